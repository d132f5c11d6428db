"""What a check of a model finds: layers and reasons from its classes, refusals of a forward, grades, verdicts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES

from comppo.computation import ComputationReader, registry, require_readable
from comppo.computation.checkup import (
    CLOSE,
    EXACT,
    ROUNDED,
    Agreement,
    compare_with_eager,
    conclude,
    judge,
    ranges,
    refusal,
    untold,
)
from comppo.computation.cost import MODES, measure_cost, peak_bytes
from comppo.computation.matrices import Comparison
from comppo.computation.parity import ParityReport
from comppo.computation.structure import examine, longest_input
from comppo.computation.trial import SHORT, random_ids, short_input, try_reading
from comppo.errors import ConfigError, UnreadableModelError


def built(name, **changes):
    architecture = ARCHITECTURES[name]
    return replace(architecture, changes={**architecture.changes, **changes}).build(name)


def tried(model):
    structure = examine(model)
    return structure, try_reading(model, structure, *short_input(model))


# From the classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "falcon", "jamba", "qwen3_moe", "mamba", "longcat_flash"])
def test_a_configuration_tells_what_its_model_tells(name):
    config = ARCHITECTURES[name].config(name)
    structure = examine(config)
    assert structure == examine(built(name))
    assert structure.depth == len({layer.position for layer in structure.layers})
    if structure.readable:
        assert structure.default_layers == require_readable(config)
        assert structure.readable == require_readable(config, layers="all")


def test_each_layer_says_how_it_is_read_or_why_not():
    attending = {name: examine(built(name)).layers[1] for name in ("llama", "falcon", "bloom", "jamba")}
    assert {name: layer.through for name, layer in attending.items()} == {
        "llama": "registry",
        "falcon": "sdpa",
        "bloom": "softmax",
        "jamba": "registry",
    }
    assert attending["jamba"].router == "JambaTopKRouter" and attending["llama"].router == ""
    structure = examine(built("jamba"))
    assert structure.readable == (1,)
    assert structure.reasons == {"JambaMambaDecoderLayer has no softmax attention": (0,)}


def test_two_attentions_in_one_layer_are_two_entries():
    structure = examine(built("longcat_flash"))
    assert structure.depth == 2
    assert [(layer.layer, layer.position) for layer in structure.layers] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_what_is_no_causal_model_is_refused():
    from transformers import T5Config, ViTConfig

    with pytest.raises(UnreadableModelError, match="encoder-decoder"):
        examine(T5Config())
    with pytest.raises(UnreadableModelError, match="not a causal language model"):
        examine(ViTConfig())


# The short input --------------------------------------------------------------------------------------------------


def test_the_longest_input_is_what_the_configuration_says():
    assert longest_input(ARCHITECTURES["llama"].config("llama")) == 128
    assert longest_input(ARCHITECTURES["gpt2"].config("gpt2")) == 128  # n_positions
    assert longest_input(ARCHITECTURES["mpt"].config("mpt")) == 128  # max_seq_len
    assert longest_input(type(ARCHITECTURES["bloom"].config("bloom"))()) is None


def test_random_tokens_stand_for_nothing_special():
    model = built("llama")
    model.config.image_token_id = 7
    model.config.eos_token_id = [2, 9]
    ids = random_ids(model, 4, 500)
    assert set(range(96)) - set(ids.flatten().tolist()) == {0, 1, 2, 7, 9}
    assert torch.equal(ids, random_ids(model, 4, 500))


def test_the_short_input_is_no_longer_than_the_model_allows():
    ids, mask = short_input(built("llama"))
    assert ids.shape == (2, SHORT) and mask.sum(-1).tolist() == [SHORT, SHORT - SHORT // 4]
    assert mask[1, 0] == 0  # on the left
    assert short_input(built("llama", max_position_embeddings=20))[0].shape == (2, 20)


# Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("llama", ("sdpa", 4, 2, 8, "torch")),
        ("gpt_oss", ("eager", 4, 2, 8, "torch")),
        ("falcon", ("sdpa", 4, 4, 8, "torch")),
        ("bloom", ("", 4, None, None, "torch")),
    ],
)
def test_reading_shows_what_ran(name, seen):
    _, trial = tried(built(name))
    for layer in trial.structure.layers:
        assert (
            layer.implementation,
            layer.heads,
            layer.key_value_heads,
            layer.head_width,
            layer.backend,
        ) == seen
    assert trial.outputs_identical and trial.finite and trial.causal


def test_flex_attention_is_named():
    model = built("llama")
    model.set_attn_implementation("flex_attention")
    assert {layer.implementation for layer in tried(model)[1].structure.layers} == {"flex_attention"}


def test_layers_that_refuse_are_told_apart(monkeypatch):
    """The first layer runs twice in a forward, which no class tells; the second is still read."""
    model = built("llama")
    first = model.model.layers[0]
    forward = first.self_attn.forward

    def twice(hidden_states, **kwargs):
        forward(hidden_states * 2, **kwargs)
        return forward(hidden_states, **kwargs)

    class Keep:
        """What the calls were given, so that no call finds the memory of the one before."""

        def __init__(self):
            self.given = []

        def observe(self, implementation, module, query, key, mask, options):
            self.given.append((query, key))

    monkeypatch.setattr(first.self_attn, "forward", twice)
    keep = Keep()
    registry.attach(keep)
    try:
        structure, trial = tried(model)
    finally:
        registry.detach(keep)
    assert structure.readable == (0, 1) and trial.structure.readable == (1,)
    assert trial.structure.reasons == {"attended twice in one forward": (0,)}
    assert trial.structure.layers[1].heads == 4 and trial.outputs_identical
    verdict = conclude(replace(structure, default_layers=(0,)), trial_with_default(trial, (0,)), None)
    assert not verdict.readable and "layer 0; 0 cannot be read" in verdict.sentence
    assert any("--gate_layers 1" in step for step in verdict.proceed)
    verdict = conclude(replace(structure, default_layers=(1,)), trial_with_default(trial, (1,)), None)
    assert verdict.readable and "layers=(1,) reads layer 1." in verdict.proceed[0]


def trial_with_default(trial, layers):
    return replace(trial, structure=replace(trial.structure, default_layers=layers))


def test_attention_to_later_tokens_is_noticed():
    structure, trial = tried(built("bert", is_decoder=False))
    assert not trial.causal
    agreement = compare_with_eager(built("bert", is_decoder=False), *short_input(built("bert")))
    assert agreement.grade == "exact"  # it is read rightly, and still no causal model
    assert "later tokens" in conclude(structure, trial, agreement).sentence


def test_a_model_that_computes_no_numbers_is_told_from_one_that_is_read_wrongly():
    model = built("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    structure, trial = tried(model)
    assert not trial.finite
    verdict = conclude(structure, trial, None)
    assert not verdict.readable and "no numbers" in verdict.sentence and "dtype" in verdict.proceed[0]


def test_a_reading_that_changes_outputs_is_reported(monkeypatch):
    model = built("llama")
    entered = ComputationReader.__enter__

    def disturb(self):
        with torch.no_grad():
            next(iter(model.parameters())).add_(1e-3)
        return entered(self)

    monkeypatch.setattr(ComputationReader, "__enter__", disturb)
    structure = examine(model)
    trial = try_reading(model, structure, *short_input(model))
    assert trial.outputs_identical is False
    assert "changes the model's outputs" in conclude(structure, trial, None).sentence


def test_a_model_that_does_not_repeat_itself_is_told_apart():
    class Restless(nn.Module):
        def forward(self, logits):
            return logits + torch.rand_like(logits)

    model = built("llama")
    model.lm_head = nn.Sequential(model.lm_head, Restless())
    structure, trial = tried(model)
    assert trial.outputs_identical is None
    verdict = conclude(structure, trial, None)
    assert verdict.readable and "do not repeat themselves" in verdict.sentence


# Comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "bound", "matrices"),
    [
        ("llama", torch.float32, EXACT, "float32"),
        ("llama", torch.bfloat16, EXACT, "float32"),
        ("falcon", torch.float32, EXACT, "float32"),
        ("falcon", torch.bfloat16, ROUNDED, "bfloat16"),
    ],
)
def test_the_bound_is_that_of_the_matrices(name, dtype, bound, matrices):
    model = built(name).to(dtype)
    agreement = compare_with_eager(model, *short_input(model))
    assert (agreement.grade, agreement.bound, agreement.matrices) == ("exact", bound, matrices)
    assert agreement.worst <= bound and agreement.outputs_identical


def test_no_comparison_has_a_reason():
    model = built("llama")
    model._can_set_attn_implementation = lambda: False
    model.model._can_set_attn_implementation = lambda: False
    model.set_attn_implementation("flex_attention")
    model.model.config._attn_implementation = "flex_attention"
    assert "load it with attn_implementation='eager'" in compare_with_eager(model, *short_input(model))


def report(dtype="float32", counted=1.0, precise=True, **errors):
    comparison = Comparison(
        errors={"collision": 1e-7, "visible_keys": 0.0, "concentration": 1e-7} | errors,
        by_layer={0: 0.0},
        compared=1.0,
        counted=counted,
    )
    return ParityReport(
        implementation="sdpa",
        dtype=dtype,
        layers=(0,),
        model_layers=1,
        eager=comparison,
        precise=comparison if precise else None,
        fed=comparison,
        own=comparison,
        forward_difference=0.0,
        own_rows=False,
        outputs_identical=True,
    )


@pytest.mark.parametrize(
    ("settings", "grade"),
    [
        ({}, "exact"),
        ({"collision": EXACT}, "exact"),
        ({"collision": 2 * EXACT}, "close"),
        ({"collision": CLOSE}, "close"),
        ({"collision": 2 * CLOSE}, "differs"),
        ({"collision": float("nan")}, "differs"),
        ({"visible_keys": 1.0}, "differs"),
        ({"visible_keys": 1.0, "counted": 0.5}, "close"),  # probabilities underflow, and matrices count too few
        ({"visible_keys": 1.0, "counted": 0.5, "collision": 2 * CLOSE}, "differs"),
        ({"dtype": "bfloat16", "collision": ROUNDED}, "differs"),
        ({"dtype": "bfloat16", "precise": False, "collision": ROUNDED}, "exact"),
        ({"dtype": "bfloat16", "precise": False, "collision": 2 * ROUNDED}, "differs"),
    ],
)
def test_grades(settings, grade):
    assert judge(report(**settings)).grade == grade


def test_the_implementation_in_use_is_judged_not_eager():
    apart = report()
    wrong = report(collision=1.0).fed
    assert judge(replace(apart, fed=wrong)).grade == "differs"
    assert judge(replace(apart, eager=wrong, own=wrong)).grade == "exact"
    assert judge(replace(apart, fed=None, own=None)).grade == "exact"


def test_a_model_that_computes_something_else_under_eager_attention_is_not_blamed_on_reading():
    wrong = report(collision=1.0).fed
    unlike = replace(report(), fed=wrong, own_rows=True, forward_difference=0.2)
    assert judge(unlike).grade == "unlike" and judge(unlike).worst <= 1e-6
    for change in ({"forward_difference": 1e-6}, {"own_rows": False}, {"eager": wrong}):
        assert judge(replace(unlike, **change)).grade == "differs"


# Concluding -------------------------------------------------------------------------------------------------------


def test_verdicts_name_layers_and_what_to_do():
    structure, trial = tried(built("llama"))
    agreement = judge(report())
    verdict = conclude(structure, trial, agreement)
    assert verdict.readable and "all 2 layers" in verdict.sentence and "agrees with eager" in verdict.sentence
    assert "agrees closely" in conclude(structure, trial, judge(report(collision=CLOSE))).sentence
    assert "agrees" not in conclude(structure, trial, "no reason").sentence
    wrong = conclude(structure, trial, judge(report(collision=1.0)))
    assert not wrong.readable and "differs from eager" in wrong.sentence and "--json" in wrong.proceed[1]
    changed = replace(judge(report()), outputs_identical=False)
    assert isinstance(changed, Agreement) and not conclude(structure, trial, changed).readable
    assert "classes alone" in conclude(structure, None, None).sentence


def test_a_model_without_attention_is_told_what_else_it_can_do():
    verdict = conclude(examine(built("mamba")), None, None)
    assert not verdict.readable and "MambaBlock has no softmax attention" in verdict.sentence
    assert "output_entropy" in verdict.proceed[0]


def test_refusals_without_a_structure():
    assert refusal(UnreadableModelError("because")).sentence == "because"
    assert not untold().readable and "--trust-remote-code" in untold().proceed[0]


@pytest.mark.parametrize(
    ("numbers", "text"), [((), "none"), ((3,), "3"), ((0, 1, 2), "0-2"), ((5, 1, 0, 7, 8), "0-1, 5, 7-8")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


# Cost -------------------------------------------------------------------------------------------------------------


def test_peak_memory_of_known_allocations():
    """Two vectors of 1 MB live at once, a third after the first is gone: the peak is 2 MB, not 3."""
    million = 1 << 20
    kept = torch.ones(million, dtype=torch.uint8)

    def side():
        first, second = torch.zeros_like(kept), torch.zeros_like(kept)
        del first
        return second, torch.zeros_like(kept)

    assert peak_bytes(side) == 2 * million


def test_cost_compares_with_a_plain_forward(monkeypatch):
    model = built("jamba")
    order = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: order.append(1) or forward(*args, **kwargs))
    costs = measure_cost(model, random_ids(model, 1, 30), layers=(1,), rounds=2)
    assert len(order) == 9  # memory once, then two rounds, of three modes
    assert [cost.mode for cost in costs] == list(MODES)
    assert [cost.layers for cost in costs] == [0, 1, 1]
    plain, *reading = costs
    assert plain.ratio == plain.least_ratio == plain.greatest_ratio == plain.peak_ratio == 1.0
    assert all(cost.least_ratio <= cost.ratio <= cost.greatest_ratio for cost in costs)
    assert all(cost.peak_bytes >= plain.peak_bytes > 0 for cost in reading)
    assert all(cost.tokens == 30 and cost.seconds > 0 for cost in costs)


def test_no_rounds_are_refused():
    model = built("llama")
    with pytest.raises(ConfigError, match="rounds=0"):
        measure_cost(model, random_ids(model, 1, 8), layers=(0,), rounds=0)
