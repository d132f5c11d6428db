"""`comppo check-model` tells what can be read, refuses the rest in one message, and runs and unpickles nothing."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "computation"))
from architectures import ARCHITECTURES

from comppo.cli import model_loading
from comppo.cli.check_model import lengths_of
from comppo.cli.model_files import locate, printable, shortened
from comppo.computation import require_readable
from comppo.errors import ConfigError, TaskError


@pytest.fixture
def check(monkeypatch, capsys):
    """The command in this process: arguments -> exit code, stdout, stderr."""

    def run(*arguments):
        from comppo.cli import main

        monkeypatch.setattr(sys, "argv", ["comppo", "check-model", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(check):
    """Exit code 2 and one message on stderr, which is returned; nothing on stdout."""

    def run(*arguments):
        code, out, err = check(*arguments)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        return err

    return run


@pytest.fixture
def saved(tmp_path):
    """Factory: an architecture, saved with its weights or its configuration alone -> the folder."""

    def factory(name, weights=True, **changes):
        folder = tmp_path / name
        if weights:
            ARCHITECTURES[name].build(name).save_pretrained(folder)
        else:
            ARCHITECTURES[name].config(name).save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return factory


# What can be read -------------------------------------------------------------------------------------------------


def test_the_bundled_model_in_a_process_of_its_own():
    """With --json stdout is one object and nothing else; progress goes to stderr."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["check-model", "bundled", "--lengths", "64,32", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "from comppo.cli import main; main()", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stderr.splitlines() == [
        "loading bundled ...",
        "reading it on a short input ...",
        "measuring the cost at 64 tokens ...",
        "measuring the cost at 32 tokens ...",
    ]
    model = found["model"]
    assert (model["class"], model["weights"], model["dtype"]) == ("LlamaForCausalLM", "loaded", "float32")
    assert (model["attention"], model["parameters"], model["threads"]) == ("sdpa", 203_456, 1)
    assert found["readable"] and found["notes"] == []
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2] and found["depth"] == 3
    assert all(layer["readable"] and layer["heads"] == 4 and layer["backend"] == "torch" for layer in found["layers"])
    assert found["trial"] == {"rows_and_tokens": [2, 48], "outputs_identical": True, "finite": True, "causal": True}
    parity = found["parity"]
    assert parity["grade"] == "exact" and parity["worst"] <= parity["bound"] == 2e-6 and parity["outputs_identical"]
    assert parity["worst"] == max(parity["errors"].values()) and found["why_no_parity"] is None
    cost = [(c["tokens"], c["mode"]) for c in found["cost"]]
    assert cost == [(tokens, mode) for tokens in (64, 32) for mode in ("plain", "default", "all_layers")]
    assert found["cost_rounds"] == 3 and found["versions"]["torch"] == torch.__version__


def test_the_page_for_people(check):
    code, out, err = check("bundled", "--lengths", "40")
    assert code == 0
    assert "Model      bundled\n" in out and "203,456 weights, 3 layers, sdpa attention, float32 on cpu" in out
    assert "0-2     readable: LlamaAttention, through Transformers' registry, sdpa; 4 heads" in out
    assert "PyTorch, streaming over blocks" in out
    assert "expected at most 2e-06: ok" in out and "identical to the bit" in out
    assert "\n           40      nothing " in out and "3 layers" in out
    assert "\nReadable: attention of all 3 layers" in out
    assert out.endswith("- comppo train --model_name_or_path bundled\n")
    assert "Traceback" not in err and "Routers" not in out


@pytest.mark.parametrize("name", ["mistral", "qwen3_moe", "falcon", "jamba", "gpt2"])
def test_what_is_read_of_other_architectures(name, check, saved):
    folder = saved(name)
    code, out, _ = check(folder, "--lengths", "", "--json")
    found = json.loads(out)
    assert code == 0 and found["readable"] and found["parity"]["grade"] == "exact" and found["cost"] == []
    config = ARCHITECTURES[name].config(name)
    assert tuple(found["default_layers"]) == require_readable(config)
    readable = [layer["layer"] for layer in found["layers"] if layer["readable"]]
    assert tuple(readable) == require_readable(config, layers="all")
    assert {layer["through"] for layer in found["layers"] if layer["readable"]} == {
        "sdpa" if name == "falcon" else "registry"
    }
    assert bool(found["default_routers"]) == (name in ("qwen3_moe", "jamba"))


def test_a_hybrid_says_which_layers_and_which_routers(check, saved):
    _, out, _ = check(saved("jamba"), "--lengths", "")
    assert "Layers     0       not readable: JambaMambaDecoderLayer has no softmax attention\n" in out
    assert "           1       readable: JambaAttention" in out
    assert "Routers    1       readable: JambaTopKRouter\n" in out
    assert "attention of layer 1 of 2" in out and "router_entropy" in out and "Cost" not in out


def test_half_precision_and_another_attention(check, saved):
    code, out, _ = check(saved("llama"), "--dtype", "bfloat16", "--attn-implementation", "eager", "--lengths", "")
    assert code == 0 and "eager attention, bfloat16" in out and "expected at most 2e-06: ok" in out


def test_a_configuration_alone_gets_random_weights(check, saved):
    code, out, err = check(saved("llama", weights=False), "--lengths", "")
    assert code == 0 and "so these are random" in out and "making random ones" in err
    assert "comppo train" not in out


def test_the_default_length_is_one_that_the_model_has(check, saved):
    _, out, _ = check(saved("llama"), "--json")
    assert {cost["tokens"] for cost in json.loads(out)["cost"]} == {128}


# What cannot ------------------------------------------------------------------------------------------------------


def test_an_unreadable_model_costs_nothing(check, saved, monkeypatch):
    monkeypatch.setattr(model_loading, "load_model", lambda *args, **kwargs: pytest.fail("it was loaded"))
    folder = saved("mamba")
    code, out, _ = check(folder)
    assert code == 1
    assert "0-1     not readable: MambaBlock has no softmax attention\n" in out
    assert "NOT READABLE: No layer's attention can be read: MambaBlock has no softmax attention." in out
    assert "--gate_statistic output_entropy" in out and "No weights were loaded." in out
    code, out, _ = check(folder, "--json")
    found = json.loads(out)
    assert code == 1 and not found["readable"] and found["model"]["weights"] == "not loaded"
    assert found["layers"][0]["why_not"] == "MambaBlock has no softmax attention" and found["parity"] is None


def test_what_only_a_forward_tells(check, saved):
    code, out, _ = check(saved("dory"), "--json")
    found = json.loads(out)
    assert code == 1 and not found["readable"] and found["model"]["weights"] == "loaded" and found["cost"] == []
    assert {layer["why_not"] for layer in found["layers"]} == {"attended twice in one forward"}


def test_a_wrong_reading_is_found(check, saved, monkeypatch):
    from comppo.computation import attention_calls

    right = attention_calls.attention_statistics

    def wrong(query, key, *, scale, **options):
        return right(query, key, scale=scale * 1.01, **options)

    monkeypatch.setattr(attention_calls, "attention_statistics", wrong)
    code, out, _ = check(saved("llama"))
    assert code == 1 and "NOT READABLE: What is read differs from eager attention" in out and "NOT OK" in out
    assert "Cost" not in out


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "t5"}, "encoder-decoder model"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, "encoder-decoder model"),
        ({"model_type": "vit"}, "not a causal language model"),
    ],
)
def test_other_kinds_of_model(config, why, check, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = check(tmp_path, "--json")
    assert code == 1 and why in json.loads(out)["verdict"]
    code, out, _ = check(tmp_path)
    assert code == 1 and why in out


def test_attention_that_hides_its_masks(check, saved):
    code, out, _ = check(saved("llama"), "--attn-implementation", "paged|sdpa")
    assert code == 1 and "pages of a shared cache" in out


def test_the_configuration_alone(check, saved, monkeypatch):
    monkeypatch.setattr(model_loading, "load_model", lambda *args, **kwargs: pytest.fail("it was loaded"))
    code, out, _ = check(saved("llama"), "--config-only")
    assert code == 0 and "judged by its classes alone" in out and "Parity" not in out
    code, out, _ = check(saved("mamba"), "--config-only")
    assert code == 1


def test_a_configuration_that_does_not_tell(check, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "reformer"}))
    code, out, _ = check(tmp_path, "--config-only", "--json")
    assert code == 1 and "does not tell" in json.loads(out)["verdict"]


# Code and pickles -------------------------------------------------------------------------------------------------


def test_code_of_the_model_runs_only_when_asked_for(check, refused, saved, monkeypatch, tmp_path):
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = saved(
        "llama",
        model_type="own",
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )
    mark = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(mark)!r}, 'w').close()\nprint('noise')\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    assert "Read that code, then pass --trust-remote-code." in refused(folder)
    assert not mark.exists()
    code, out, _ = check(folder, "--trust-remote-code", "--lengths", "", "--json")
    found = json.loads(out)  # what the code prints is not on stdout
    assert code == 0 and mark.exists() and found["model"]["class"] == "OwnForCausalLM"


def test_a_configuration_may_not_bring_attention_from_the_hub(check, refused, saved):
    folder = saved("llama", _attn_implementation="somebody/kernel")
    assert "asks for code on the hub ('somebody/kernel'), which is not run" in refused(folder)
    assert check(folder, "--attn-implementation", "sdpa", "--lengths", "")[0] == 0


def test_pickled_weights_are_not_read(check, refused, saved):
    folder = saved("llama", weights=False)
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert "weights in pytorch_model.bin, and pickled files may run code" in refused(folder)
    assert check(folder, "--config-only")[0] == 0


def test_names_cannot_command_the_terminal(check, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x\x1b[31mred\u202e"}))
    message = refused(tmp_path)
    assert "\x1b" not in message and "\u202e" not in message and "x\\x1b[31mred" in message
    assert "\x1b" not in refused("./no\x1b[2Jsuch")
    assert printable("a\tb\x1b\x9b\u2028c é") == "a\\tb\\x1b\\x9b\\u2028c é"


# Files and arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("{", "not a valid JSON file"),
        ("[1]", "model_type"),
        ('{"model_type": "no such"}', "does not recognize this architecture"),
        ('{"model_type": "llama", "num_hidden_layers": "two"}', "expected int, got str"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "zero"),
    ],
)
def test_broken_configurations(config, why, refused, tmp_path):
    (tmp_path / "config.json").write_text(config)
    message = refused(tmp_path)
    assert why in message and message.count("\n") == 1
    assert "this version of Transformers" in message or "may be damaged" in message


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 500), "header"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "header"),
        (lambda folder: replace_in(folder, hidden_size=64), "other shapes than the configuration says"),
        (lambda folder: replace_in(folder, dtype="int3"), "int3"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
            "from safetensors or GGUF",
        ),
    ],
)
def test_broken_weights(damage, why, refused, saved):
    folder = saved("llama")
    damage(folder)
    message = refused(folder)
    assert why in message and "cannot be loaded" in message


def replace_in(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_weights_are_told(check, saved):
    folder = saved("llama", num_hidden_layers=3)
    code, out, _ = check(folder, "--lengths", "", "--json")
    notes = json.loads(out)["notes"]
    assert code == 0 and len(notes) == 1 and "9 weights are not in the files and are random" in notes[0]
    assert notes[0] in check(folder, "--lengths", "")[1]


def test_what_a_name_stands_for(tmp_path, saved, refused):
    folder = saved("llama")
    assert locate("bundled").local and locate("bundled").weights
    hub = locate("some/model", revision="v1")
    assert not hub.local and hub.options == {"trust_remote_code": False, "revision": "v1"}
    (tmp_path / "one.gguf").write_bytes(b"junk" * 9)
    gguf = locate(str(tmp_path / "one.gguf"))
    assert gguf == replace(locate(str(tmp_path), gguf_file="one.gguf"), name=gguf.name)
    assert gguf.path == str(tmp_path) and gguf.options["gguf_file"] == "one.gguf"
    with pytest.raises(TaskError, match="bundled:nothing"):
        locate("bundled:nothing")
    for arguments, message in (
        ({"name": str(tmp_path / "nothing")}, "no such file or folder"),
        ({"name": "a/b/c"}, "no such file or folder"),
        ({"name": str(folder / "config.json")}, "is a file"),
        ({"name": str(folder), "revision": "v1"}, "--revision 'v1' is for models on the hub"),
        ({"name": str(folder), "gguf_file": "x.gguf"}, "holds no such file"),
        ({"name": str(tmp_path)}, "--gguf-file one.gguf"),
    ):
        with pytest.raises(ConfigError, match=message):
            locate(**arguments)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "its base model" in refused(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "adapter")
    assert "does not start with the GGUF magic bytes" in refused(tmp_path / "one.gguf")


def test_a_hub_name_without_network(refused):
    """Tests run offline."""
    message = refused("nobody/nothing-of-that-name")
    assert "cannot be read: We couldn't connect" in message and "or give a local folder" in message
    assert len(message) < 800 and message.count("\n") == 1


def test_wrong_arguments(refused, saved):
    folder = saved("llama")
    assert "'int3' is not one of" in refused(folder, "--dtype", "int3")
    assert "--lengths 4096 is more than the 128 positions" in refused(folder, "--lengths", "20,4096")
    assert "'many' is no number of tokens" in refused(folder, "--lengths", "many")
    assert "--device 'tpu' is unknown" in refused(folder, "--device", "tpu")
    assert "sees 0 GPUs" in refused(folder, "--device", "cuda:7") or torch.cuda.device_count()
    assert '`attn_implementation="nonsense"` is not supported' in refused(folder, "--attn-implementation", "nonsense")


@pytest.mark.parametrize(
    ("text", "longest", "lengths"),
    [(None, None, (512,)), (None, 100, (100,)), ("", 100, ()), ("8, 4,", None, (8, 4)), ("100", 100, (100,))],
)
def test_lengths(text, longest, lengths):
    assert lengths_of(text, longest) == lengths


@pytest.mark.parametrize("text", ["1", "0", "-5", "2.5", "²", "8;9"])
def test_lengths_that_are_none(text):
    with pytest.raises(ConfigError, match="no number of tokens above 1"):
        lengths_of(text, None)


def test_messages_of_others_are_shortened():
    assert shortened(ValueError("One.\n  Two\n\nThree")) == "One. Two."
    assert shortened(ValueError("Short one. " + "x" * 400)) == "Short one."
    assert len(shortened(ValueError("x" * 1000))) < 310
    assert shortened(ValueError("")) == "ValueError."


# Memory -----------------------------------------------------------------------------------------------------------


def test_weights_that_cannot_fit_are_not_loaded(refused, saved, monkeypatch):
    monkeypatch.setattr(model_loading, "physical_memory", lambda: 1e4)
    message = refused(saved("llama"))
    assert "does not fit: its 21,664 weights need 0.0 GB" in message and "--config-only" in message


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[DefaultCPUAllocator: can't]")]
)
def test_running_out_of_memory(error, check, refused, saved, monkeypatch):
    from transformers import LlamaForCausalLM

    from comppo.computation import cost

    def fail(*args, **kwargs):
        raise error

    folder = saved("llama")
    with monkeypatch.context() as patch:
        patch.setattr(cost, "measure_cost", fail)
        code, out, _ = check(folder, "--lengths", "16,32", "--json")
        found = json.loads(out)
        assert code == 0 and found["cost"] == [] and found["parity"]["grade"] == "exact"
        assert len(found["notes"]) == 1 and "not enough memory for 16 tokens" in found["notes"][0]
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", fail)
        assert "not enough memory for a forward of 2 short rows" in refused(folder)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fail)
    assert "not enough memory for the weights" in refused(folder)


def test_a_forward_that_fails_is_one_message(refused, saved, monkeypatch):
    from transformers import LlamaForCausalLM

    def fail(*args, **kwargs):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    message = refused(saved("llama"))
    assert "a forward of 2 short rows fails: RuntimeError: not implemented for 'Half'." in message
    assert "--dtype" in message


def test_help_lists_the_command_without_importing_it():
    code = (
        "import sys; from click.testing import CliRunner; from comppo.cli import cli;"
        "out = CliRunner().invoke(cli, ['--help']).output; assert 'check-model' in out, out;"
        "assert not any(m in sys.modules for m in ('torch', 'transformers', 'comppo.cli.check_model'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
