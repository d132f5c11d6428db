"""The callback that writes pages, beside a stand-in for the trainer; `tests/cli` has it in a real one."""

from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from comppo.errors import ConfigError
from comppo.inspect.checkpoints import credit_settings
from comppo.inspect.training import InspectCallback
from comppo.tasks.base_models import resolve_model
from comppo.tasks.chain import chain_reward

ROWS = [{"prompt": "a7 b3 ca@1 ?c>", "answer": "5"}]


def trainer(processes=1):
    folder = resolve_model("bundled")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=processes, unwrap_model=lambda given: given),
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=credit_settings(),
        max_completion_length=12,
        _critic=None,
    )


def test_pages_come_when_due_and_none_is_overwritten(tmp_path):
    folder = tmp_path / "inspect"
    watched = trainer()
    callback = InspectCallback(watched, ROWS, reward_funcs=[chain_reward], folder=folder, every=2)
    for step in (1, 2, 3, 4):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    pages = {page.name: page.read_bytes() for page in folder.iterdir()}
    assert sorted(pages) == ["step-000002.html", "step-000004.html"]
    for parameter in watched.model.parameters():  # a resumed run that goes another way
        parameter.data.mul_(1.01)
    callback.on_step_end(None, SimpleNamespace(global_step=4), None)
    assert {name: (folder / name).read_bytes() for name in pages} == pages
    assert len(list((folder / "step-000004").iterdir())) == 1


@pytest.mark.parametrize(
    ("processes", "rows", "every", "said"),
    [
        (2, ROWS, 1, "inspect_every=1 needs a single process, got 2"),
        (1, [{"prompt": "a", "image": 0}], 1, "prompts with images"),
        (1, ROWS, 0, "inspect_every=0 must be at least 1"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, processes, rows, every, said):
    with pytest.raises(ConfigError, match=said):
        InspectCallback(trainer(processes), rows, reward_funcs=[], folder=tmp_path, every=every)


def test_models_without_readable_attention_are_refused(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    odd = trainer()
    odd.model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="no layer of this model has attention"):
        InspectCallback(odd, ROWS, reward_funcs=[], folder=tmp_path, every=1)
