"""Every architecture's readings against its own attention matrices; and that the comparison finds what is wrong."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, padded_rows

from comppo.computation import ComputationReader, require_readable
from comppo.computation.matrices import STATISTICS, reference_statistics
from comppo.computation.parity import check_parity, compare_with_matrices
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

FLOAT32, BFLOAT16 = 2e-6, 2e-2
READ = [name for name, architecture in ARCHITECTURES.items() if not architecture.refused]
REFUSED = [name for name, architecture in ARCHITECTURES.items() if architecture.refused]
HIDING = ("window", "index", "dynamic mask", "compressed")  # kinds of attention that hide earlier keys


def gaps_marked(names):
    """The names as parameters; a test must fail as long as its architecture has a known gap."""
    gaps = {name: ARCHITECTURES[name].known_gap for name in names}
    return [
        pytest.param(n, marks=[pytest.mark.xfail(reason=gap, strict=True)] if gap else []) for n, gap in gaps.items()
    ]


def test_the_table_is_broad():
    assert len(READ) >= 110
    for kind in ("dense", "GQA", "MQA", "MLA", "sliding", "chunked", "softcap", "learned sinks", "hybrid", "MoE"):
        assert any(kind in ARCHITECTURES[name].kind for name in READ), kind


@pytest.mark.parametrize("name", gaps_marked(READ))
def test_parity(name):
    """Rows padded on the left and on the right, all readable layers, sinks left out (two keys, and one) and not.

    The bounds are on reading: of the eager forward that returned the matrices, and of the model's own implementation
    with each layer fed that forward's hidden states. A forward of its own differs by the rounding of all layers before;
    in float32 that stays within the same bound, in bfloat16 routers and indexes choose others. Matrices in bfloat16 are
    rounded themselves; where the model's eager attention is given the same queries and keys in float32, they are not.
    """
    architecture = ARCHITECTURES[name]
    model = architecture.build(name)
    ids, mask = padded_rows()
    report = check_parity(model, ids, mask, sink_tokens=2)
    assert report.layers == (architecture.layers or tuple(range(report.model_layers)))
    assert report.outputs_identical
    for comparison in (report.eager, report.fed, report.own):
        if comparison is not None and not (comparison is report.own and architecture.own_differs):
            assert comparison.worst <= FLOAT32, comparison
            assert comparison.compared > 0.8 and comparison.counted > 0.7
    if architecture.own_differs:  # on the left only: padding decides what real tokens compute
        assert report.forward_difference > 0.1, "its forwards agree: delete own_differs"
        assert check_parity(model, ids[::2], mask[::2], sink_tokens=2).own.worst <= FLOAT32
    half = check_parity(copy.deepcopy(model).bfloat16(), ids, mask, sink_tokens=1)
    assert half.dtype == "bfloat16" and half.layers == report.layers and half.outputs_identical
    assert half.eager.worst <= BFLOAT16, half.eager
    assert (half.precise is None) == architecture.bypass
    for comparison in (half.precise, half.fed):
        assert comparison is None or comparison.worst <= (BFLOAT16 if architecture.bypass else FLOAT32), comparison


@pytest.mark.parametrize("name", READ)
def test_the_comparison_is_not_of_uniform_or_wholly_visible_attention(name):
    """Concentration is away from 0 and 1 in every layer, and windows and indexes do hide keys."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(name)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    ids, mask = padded_rows()
    with torch.no_grad():
        attentions = model(input_ids=ids, attention_mask=mask, use_cache=False, output_attentions=True).attentions
    layers = [reference_statistics(m, mask, sink_tokens=0) for m in attentions if m is not None and m.shape[2] == 20]
    assert layers
    for layer in layers:
        concentration = layer["concentration"][mask.bool() & (layer["visible_keys"] > 2).all(-1)]
        assert 0.02 < concentration.mean() < 0.4
    hides = min(float(layer["visible_keys"][0].max()) for layer in layers) < 20
    assert hides == any(kind in architecture.kind for kind in HIDING)


@pytest.mark.parametrize("name", gaps_marked(REFUSED))
def test_what_cannot_be_read_is_refused_by_name(name):
    """From the configuration where possible, else by the first forward; never with wrong numbers."""
    architecture = ARCHITECTURES[name]
    ids, mask = padded_rows()
    with pytest.raises(UnreadableModelError, match=architecture.refused):
        check_parity(architecture.build(name), ids, mask)
    if not architecture.late:
        with pytest.raises(UnreadableModelError, match=architecture.refused):
            require_readable(architecture.config(name), layers="all")


def test_the_docs_list_every_architecture():
    """`python benchmarks/parity.py` writes the page; it was run since the table changed."""
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    tables, refused, gaps = (
        page.partition("## Refused")[0],
        page.partition("## Refused")[2],
        page.partition("## Known")[2],
    )
    for name, architecture in ARCHITECTURES.items():
        part = gaps if architecture.known_gap else refused if architecture.refused else tables
        assert f"| {name} " in part, name


@pytest.fixture
def llama():
    return ARCHITECTURES["llama"].build("llama")


def read(model, sink_tokens=1, **inputs):
    reader = ComputationReader(model, statistics=STATISTICS, layers="all", sink_tokens=sink_tokens)
    with torch.no_grad(), reader:
        return reader, model(**inputs, use_cache=False)


def test_a_wrong_mask_sink_or_layer_is_an_error_far_above_the_bound(llama):
    ids, mask = padded_rows()
    llama.set_attn_implementation("eager")
    reader, output = read(llama, input_ids=ids, attention_mask=mask, output_attentions=True)
    right = compare_with_matrices(reader, output.attentions, mask, sink_tokens=1)
    assert right.worst <= FLOAT32
    assert set(right.errors) == {*STATISTICS, "visible_keys"} and set(right.by_layer) == {0, 1}
    for attentions, wrong_mask, sink_tokens in (
        (output.attentions, mask, 2),
        (output.attentions, torch.ones_like(mask), 1),
        (output.attentions[::-1], mask, 1),
        ([m.roll(1, 1) for m in output.attentions], mask, 1),
        ([m.tril(-1) for m in output.attentions], mask, 1),
    ):
        assert compare_with_matrices(reader, attentions, wrong_mask, sink_tokens=sink_tokens).worst > 1e-2
    unmasked, _ = read(llama, input_ids=ids)
    assert compare_with_matrices(unmasked, output.attentions, mask, sink_tokens=1).worst > 1e-2


def test_nan_is_never_the_better_error(llama):
    ids, mask = padded_rows()
    llama.set_attn_implementation("eager")
    reader, output = read(llama, input_ids=ids, attention_mask=mask, output_attentions=True)
    matrices = [m.clone() for m in output.attentions]
    matrices[1][0, 0, 10, 5] = torch.nan
    assert not compare_with_matrices(reader, matrices, mask, sink_tokens=0).worst <= BFLOAT16


def test_a_comparison_of_nothing_is_refused(llama):
    ids, mask = padded_rows()
    llama.set_attn_implementation("eager")
    reader, output = read(llama, 20, input_ids=ids, attention_mask=mask, output_attentions=True)
    with pytest.raises(EvidenceError, match=r"outside the sinks.*fewer sink_tokens"):
        compare_with_matrices(reader, output.attentions, mask, sink_tokens=20)
    with pytest.raises(EvidenceError, match=r"1 attention matrices for 2 layers.*\(0, 1\)"):
        compare_with_matrices(reader, output.attentions[:1], mask, sink_tokens=20)


def test_the_model_is_as_before(llama):
    """Implementation, registry, hooks and results; also when the forward fails."""
    from transformers.modeling_utils import AttentionInterface

    ids, mask = padded_rows()
    registry = dict(AttentionInterface._global_mapping)
    check_parity(copy.deepcopy(llama).bfloat16(), ids, mask)
    check_parity(llama, ids, mask)
    hooks = sum(len(m._forward_hooks) for m in llama.modules())  # Transformers leaves its recorders of matrices
    with torch.no_grad():
        before = llama(input_ids=ids, attention_mask=mask).logits
    check_parity(llama, ids, mask)
    assert llama.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks for m in llama.modules())
    assert sum(len(m._forward_hooks) for m in llama.modules()) == hooks
    with torch.no_grad():
        assert torch.equal(llama(input_ids=ids, attention_mask=mask).logits, before)
    with pytest.raises(IndexError):
        check_parity(llama, ids + 1000, mask)
    assert llama.config._attn_implementation == "sdpa" and AttentionInterface._global_mapping == registry
    assert not any(m._forward_pre_hooks for m in llama.modules())


def test_a_reading_that_changes_the_outputs_is_reported(llama, monkeypatch):
    ids, mask = padded_rows()
    entered = ComputationReader.__enter__

    def disturb(self):
        with torch.no_grad():
            next(iter(llama.parameters())).add_(1e-3)
        return entered(self)

    monkeypatch.setattr(ComputationReader, "__enter__", disturb)
    assert check_parity(llama, ids, mask).outputs_identical is False


def test_a_model_that_does_not_repeat_itself_is_told_apart(llama):
    class Restless(nn.Module):
        def forward(self, logits):
            return logits + torch.rand_like(logits)

    ids, mask = padded_rows()
    llama.lm_head = nn.Sequential(llama.lm_head, Restless())
    assert check_parity(llama, ids, mask).outputs_identical is None


def test_a_wrapped_model_is_checked(llama):
    from peft import LoraConfig, get_peft_model

    ids, mask = padded_rows()
    wrapped = get_peft_model(llama, LoraConfig(target_modules=["q_proj"], r=2)).eval()
    report = check_parity(wrapped, ids, mask)
    assert report.implementation == "sdpa" and report.layers == (0, 1) and report.own.worst <= FLOAT32


def test_training_mode_is_refused(llama):
    ids, mask = padded_rows()
    with pytest.raises(ConfigError, match=r"training mode.*model.eval\(\)"):
        check_parity(llama.train(), ids, mask)


def test_a_learned_sink_that_the_matrices_hide_is_read_from_its_definition():
    """Granite SWA scales the attention's output by 1 - sink; its rows sum to 1, so the mass is checked by hand."""
    from comppo.computation import registry

    architecture = ARCHITECTURES["granite_swa"]
    model = architecture.build("granite_swa")
    ids, mask = padded_rows()
    assert "sink_mass" not in check_parity(model, ids, mask).eager.errors
    assert "sink_mass" in check_parity(ARCHITECTURES["gpt_oss"].build("gpt_oss"), ids, mask).eager.errors
    masses = []

    class Watch:
        def observe(self, implementation, module, query, key, mask, options):
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scores = query.double() @ keys.double().transpose(2, 3) * options["scaling"] + mask.double()
            learned = options["s_aux"].double()[None, :, None]
            masses.append(torch.sigmoid(learned - scores.logsumexp(-1)).transpose(1, 2))

    watch = Watch()
    registry.attach(watch)
    try:
        reader, _ = read(model, 0, input_ids=ids, attention_mask=mask)
    finally:
        registry.detach(watch)
    for layer, want in enumerate(masses):
        error = (reader.statistic("sink_mass")[:, :, layer].double() - want)[mask.bool()].abs().max()
        assert error <= FLOAT32 and want[mask.bool()].max() > 0.1
