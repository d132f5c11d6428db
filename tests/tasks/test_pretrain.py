"""Making the base model, and the one that comes with the package."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from comppo.errors import ConfigError, RunExistsError
from comppo.tasks import chain
from comppo.tasks.base_models import resolve_model
from comppo.tasks.demonstrator import demonstrate
from comppo.tasks.pretrain import (
    END_WEIGHTS,
    LINE_WEIGHTS,
    POSITIONS,
    ModelSize,
    draw_batch,
    learning_rate,
    main,
    make_base_model,
    measure,
    well_formed,
)

SMALL = ModelSize(layers=1, hidden=16, heads=2, intermediate=16)
BUNDLED = Path(resolve_model("bundled"))


@pytest.fixture(scope="module")
def bundled():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(BUNDLED), AutoTokenizer.from_pretrained(BUNDLED)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_same_steps_and_seed_give_the_same_weights(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(name) + seed)  # whatever the global state
        before = torch.get_rng_state()
        make_base_model(tmp_path / name, steps=4, seed=seed, size=SMALL, measured=0)
        assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


def test_training_lowers_the_loss(tmp_path):
    few = json.loads((make_base_model(tmp_path / "few", steps=1, size=SMALL, measured=0) / "card.json").read_text())
    many = json.loads((make_base_model(tmp_path / "many", steps=300, size=SMALL, measured=0) / "card.json").read_text())
    assert few["final_loss"] > 3.5 > 3.0 > many["final_loss"]  # ln(50) = 3.91 at the start


def test_nothing_is_overwritten_and_steps_are_checked(tmp_path, capsys):
    with pytest.raises(RunExistsError, match="nothing is overwritten"):
        make_base_model(tmp_path, steps=1)
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        make_base_model(tmp_path / "new", steps=0)
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path)])
    assert "nothing is overwritten" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_learning_rate():
    rates = [learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 60)
    assert rates[59:250] == [1.0] * 191
    assert rates[625] == pytest.approx(0.5) and rates[-1] == 0.02


def test_batches_are_demonstrations_of_training_prompts():
    ids, prompt_length = draw_batch(np.random.default_rng(0), 3, 1)
    texts = ["".join(chain.VOCABULARY[i] for i in row[:-1]) for row in ids.tolist()]
    assert all(row[-1] == chain.TOKEN_IDS[chain.EOS] for row in ids.tolist())
    assert all(well_formed(text[:prompt_length], text[prompt_length:]) for text in texts)
    assert not any(chain.is_held_out(text[:prompt_length]) for text in texts)
    assert len(LINE_WEIGHTS) == chain.LINE_LENGTH
    assert ids.shape[1] - prompt_length == 6 * len(LINE_WEIGHTS) + len(END_WEIGHTS)


def test_positions_cover_the_longest_problem():
    longest = 0
    for length, distractors in ((25, 0), (12, 1), (1, 12)):
        problems = chain.draw_problems(np.random.default_rng(0), 1, length=length, distractors=distractors)
        longest = max(longest, len(chain.render_prompts(problems)[0] + chain.render_responses(problems)[0][0]) + 1)
    assert longest <= POSITIONS


def test_well_formed():
    problems = chain.draw_problems(np.random.default_rng(0), 1, length=2, distractors=1)
    prompt, response = chain.render_prompts(problems)[0], demonstrate(problems, np.random.default_rng(1))[0][0]
    assert well_formed(prompt, response)
    assert not well_formed(prompt, response[:-1]) and not well_formed(prompt, response + "1")
    for position, character in enumerate(response):
        changed = response[:position] + ("z" if character != "z" else "y") + response[position + 1 :]
        assert not well_formed(prompt, changed), position


def test_the_bundled_model_is_small_and_says_what_it_is(bundled):
    model, tokenizer = bundled
    card = json.loads((BUNDLED / "card.json").read_text())
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) < 2e6
    assert card["parameters"] == sum(p.numel() for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert tokenizer.get_vocab() == chain.TOKEN_IDS and tokenizer.padding_side == "left"
    assert (tokenizer.pad_token, tokenizer.eos_token) == (chain.PAD, chain.EOS)
    assert model.generation_config.do_sample and model.generation_config.top_k == 0
    assert f"--steps {card['steps']} --seed {card['seed']}" in card["command"]


def test_the_bundled_model_is_as_good_as_its_card_says(bundled):
    """Other prompts and other samples than the card's: both counts are binomial, so their difference has the sum of
    the variances; 4.5 standard errors (a false alarm once in 150 000)."""
    config, count = chain.ChainConfig(), 384
    card = json.loads((BUNDLED / "card.json").read_text())
    (row,) = (r for r in card["held_out"] if (r["length"], r["distractors"]) == (config.length, config.distractors))
    found = measure(*bundled, length=config.length, distractors=config.distractors, count=count, seed=12345)
    for name in ("sampled", "greedy"):
        share = row[f"{name}_accuracy"]
        spread = (share * (1 - share) * (1 / count + 1 / row["count"])) ** 0.5
        assert abs(found[f"{name}_accuracy"] - share) < 4.5 * spread
        assert found[f"{name}_well_formed"] > 0.9 * count
