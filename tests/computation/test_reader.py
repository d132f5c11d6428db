"""The reader against eager attention's own matrices, on several architectures, and the traces it must not leave."""

import copy
import os
import pickle

import pytest
import torch
from torch import nn

from comppo.computation import ATTENTION_STATISTICS, AttentionStatistic, ComputationReader, registry
from comppo.computation.attention_calls import statistics_of_call
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

NAMES = ("collision", "entropy", "maximum", "sink_mass")
ARCHITECTURES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi", "olmo2", "smollm3", "qwen3_moe", "gpt_oss",
]  # fmt: skip
EAGER_ONLY = ("gemma2", "gpt_oss")  # softcap and learned sinks: Transformers has no sdpa for them


def collision_reader(model, **settings):
    return ComputationReader(model, statistics=("collision",), **settings)


def from_matrices(matrices, mask, sink_tokens):
    """Sink-excluded statistics, (rows, tokens, layers, heads), from the probabilities that eager attention returned."""
    first = mask.argmax(-1)
    keys = torch.arange(mask.shape[1])
    sink = (keys < first[:, None] + sink_tokens)[:, None, None]
    out = {name: [] for name in NAMES}
    for matrix in matrices:
        p = matrix.double()
        rest = p.masked_fill(sink, 0.0)
        total = rest.sum(-1, keepdim=True)
        q = rest / total.clamp_min(1e-30)
        out["sink_mass"].append(1.0 - total.squeeze(-1))  # a learned sink's mass is missing from the matrix as well
        out["collision"].append(q.square().sum(-1))
        out["entropy"].append(-torch.xlogy(q, q).sum(-1))
        out["maximum"].append(q.amax(-1))
    # Only where other keys than the sinks are visible; the float32 matrix keeps no digits of very small remainders.
    usable = (mask.bool() & (keys >= first[:, None] + sink_tokens))[:, :, None, None]
    kept = torch.stack([1.0 - mass for mass in out["sink_mass"]], -1).permute(0, 2, 3, 1) > 0.05
    return {k: torch.stack(v, -1).permute(0, 2, 3, 1) for k, v in out.items()}, usable & kept


def uncompiled_flex(query, key, value, training=False, **kwargs):
    """What the compiled kernel computes, without a compiler."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, **kwargs)


def assert_reads(reader, want, usable, atol):
    for name in NAMES:
        got = reader.statistic(name)
        assert got.dtype == torch.float32 and got.isfinite().all()
        error = ((got.double() - want[name]).abs() * usable).max()
        assert error <= atol, f"{name}: {error}"
    assert usable.float().mean() > 0.3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parity_with_attention_matrices(name, build, padded):
    """Left and right padding, two sinks, windows, softcap, learned sinks; outputs equal to the bit with and without."""
    ids, mask = padded
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        eager = build(name, "eager")
        with ComputationReader(eager, statistics=NAMES, layers="all", sink_tokens=2) as reader:
            output = eager(**inputs, output_attentions=True)
        want, usable = from_matrices(output.attentions, mask, 2)
        assert_reads(reader, want, usable, 2e-6)
        assert torch.equal(output.logits, eager(**inputs).logits)
        if name in EAGER_ONLY:
            return
        sdpa = build(name, "sdpa")
        with ComputationReader(sdpa, statistics=NAMES, layers="all", sink_tokens=2) as reader:
            read_logits = sdpa(**inputs).logits
        assert_reads(reader, want, usable, 1e-5)
        assert torch.equal(read_logits, sdpa(**inputs).logits)
        visible = reader.visible_keys()
        assert torch.equal(visible[0, :, 0], torch.arange(1, 21).clamp_max(6 if name == "mistral" else 20).float())
        assert visible[1, 7, 0] == 1 and visible[1, 6, 0] == 0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_micro_batches_are_concatenated_and_sinks_follow_each_batch_s_padding(implementation, build, padded):
    ids, mask = padded
    model = build("llama", implementation)
    with torch.no_grad():
        with collision_reader(model, layers="all", positions=slice(-10, -1), hidden_layers=(-1,)) as whole:
            model(input_ids=ids, attention_mask=mask)
        with collision_reader(model, layers="all", positions=slice(-10, -1), hidden_layers=(-1,)) as parts:
            for i in range(0, 4, 2):
                model(input_ids=ids[i : i + 2], attention_mask=mask[i : i + 2])
    assert (whole.forwards, parts.forwards) == (1, 2)
    assert parts.statistic("collision").shape == (4, 9, 2, 4)
    torch.testing.assert_close(parts.statistic("collision"), whole.statistic("collision"), rtol=0, atol=1e-5)
    torch.testing.assert_close(parts.statistic("sink_mass"), whole.statistic("sink_mass"), rtol=0, atol=1e-5)
    torch.testing.assert_close(parts.hidden()[mask[:, -10:-1].bool()], whole.hidden()[mask[:, -10:-1].bool()])


def test_index_t_is_the_position_that_emits_token_t(build, padded):
    ids, mask = padded
    model = build("qwen3")
    with torch.no_grad():
        with collision_reader(model, layers="all", hidden_layers=(0, 1, -1)) as every:
            output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        with collision_reader(model, layers="all", positions=slice(-7, -1), hidden_layers=(0, 1, -1)) as response:
            model(input_ids=ids, attention_mask=mask)
    assert torch.equal(response.statistic("collision"), every.statistic("collision")[:, -7:-1])
    assert torch.equal(response.visible_keys(), every.visible_keys()[:, -7:-1])
    assert torch.equal(every.hidden(), torch.cat([output.hidden_states[i] for i in (0, 1, -1)], -1))
    assert torch.equal(response.hidden(), every.hidden()[:, -7:-1])
    h = torch.cat([output.hidden_states[i] for i in (0, 1, -1)], -1)
    change = (h[:, 1:] - h[:, :-1]).norm(dim=-1) / h[:, :-1].norm(dim=-1)
    change = change.masked_fill(h[:, :-1].norm(dim=-1) == 0, 0.0)  # padding's embedding is zero
    torch.testing.assert_close(every.hidden_change()[:, 1:], change)
    torch.testing.assert_close(response.hidden_change(), change[:, -7:-1])


def test_the_last_hidden_state_is_what_the_head_is_fed(build, padded):
    ids, mask = padded
    for name in ("llama", "gpt2", "gemma2"):
        model = build(name, "eager")
        fed = []
        handle = model.get_output_embeddings().register_forward_pre_hook(lambda m, args, fed=fed: fed.append(args[0]))
        with torch.no_grad(), collision_reader(model, hidden_layers=(-1,)) as reader:
            model(input_ids=ids, attention_mask=mask)
        handle.remove()
        assert torch.equal(reader.hidden(), fed[0])


def test_statistics_of_whole_rows_are_those_without_sinks(build, padded):
    """Beside the sink-excluded ones in one reading, and what they are where no key is a sink."""
    ids, mask = padded
    model = build("llama")
    names = [name for name in ATTENTION_STATISTICS if name.startswith("whole_")]
    assert len(names) == 7
    with torch.no_grad():
        with ComputationReader(model, statistics=names, layers="all", sink_tokens=2) as one:
            model(input_ids=ids, attention_mask=mask)
        plain = [name.removeprefix("whole_") for name in names]
        with ComputationReader(model, statistics=plain, layers="all", sink_tokens=0) as other:
            model(input_ids=ids, attention_mask=mask)
    for whole, name in zip(names, plain, strict=True):
        torch.testing.assert_close(one.statistic(whole), other.statistic(name), rtol=1e-5, atol=1e-5)
    assert (other.statistic("sink_mass") == 0).all() and one.statistic("sink_mass").max() > 0.1


def test_heads_are_kept_chosen_or_averaged(build, padded):
    ids, mask = padded
    model = build("llama")
    read = {}
    for heads in (None, "mean", (3, 1)):
        with torch.no_grad(), collision_reader(model, layers=(1,), heads=heads) as reader:
            model(input_ids=ids, attention_mask=mask)
        read[heads] = reader.statistic("collision")
    torch.testing.assert_close(read["mean"], read[None].mean(-1, keepdim=True))
    assert torch.equal(read[3, 1], read[None][..., [3, 1]])


def test_thirds_of_the_layers(build):
    """At least one layer, whatever the depth."""
    thirds = {1: ((0,), (0,), (0,)), 2: ((0,), (0, 1), (1,)), 3: ((0,), (1,), (2,)), 7: ((0, 1), (2, 3, 4), (5, 6))}
    for depth, parts in (thirds | {9: ((0, 1, 2), (3, 4, 5), (6, 7, 8))}).items():
        model = build("llama", num_hidden_layers=depth)
        for name, part in zip(("first", "middle", "last"), parts, strict=True):
            assert ComputationReader(model, layers=name).layers == part
        assert ComputationReader(model).layers == parts[2]


def test_registry_and_model_are_as_before_even_after_an_exception(build, padded):
    from transformers.modeling_utils import AttentionInterface

    ids, mask = padded
    before = dict(AttentionInterface._global_mapping)
    model = build("llama")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with (
        pytest.raises(RuntimeError, match="inside"),
        collision_reader(model, hidden_layers=(0, -1)),
    ):
        assert AttentionInterface._global_mapping["sdpa"] is not before["sdpa"]
        with ComputationReader(
            model, statistics=("collision",)
        ):  # nested: the inner exit must not end the outer reading
            model(input_ids=ids, attention_mask=mask)
        assert AttentionInterface._global_mapping["sdpa"] is not before["sdpa"]
        raise RuntimeError("inside")
    assert dict(AttentionInterface._global_mapping) == before
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_an_error_in_the_forward_restores_too(build, padded):
    from transformers.modeling_utils import AttentionInterface

    ids, mask = padded
    before, model = dict(AttentionInterface._global_mapping), build("llama")
    with pytest.raises(EvidenceError, match="one length"), collision_reader(model):
        model(input_ids=ids, attention_mask=mask)
        model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1])
    assert dict(AttentionInterface._global_mapping) == before


def test_the_wrapper_is_one_object_for_the_life_of_the_process(build):
    from transformers.modeling_utils import AttentionInterface

    seen = []
    for _ in range(2):
        with collision_reader(build("llama")):
            seen.append(AttentionInterface._global_mapping["sdpa"])
    assert seen[0] is seen[1]


def test_other_models_pass_unseen(build, padded):
    ids, mask = padded
    policy, reference = build("llama"), build("llama", "eager")
    with torch.no_grad(), collision_reader(policy) as reader:
        reference(input_ids=ids, attention_mask=mask)
        assert reader.forwards == 0
        policy(input_ids=ids, attention_mask=mask)
        reference(input_ids=ids[:, :5])
    assert reader.statistic("collision").shape[0] == 4


def test_peft_and_data_parallel_wrappers(build, padded, tmp_path):
    from peft import LoraConfig, get_peft_model

    ids, mask = padded
    plain = build("llama")
    with torch.no_grad(), collision_reader(plain, hidden_layers=(-1,)) as want:
        logits = plain(input_ids=ids, attention_mask=mask).logits
    peft = get_peft_model(copy.deepcopy(plain), LoraConfig(r=2, target_modules=["q_proj", "k_proj"])).eval()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for model in (peft, nn.parallel.DistributedDataParallel(peft)):
            with torch.no_grad(), collision_reader(model, hidden_layers=(-1,)) as got:
                assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, logits)
            assert torch.equal(got.statistic("collision"), want.statistic("collision"))
            assert torch.equal(got.hidden(), want.hidden())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("no_grad", [True, False])
def test_activation_checkpointing(no_grad, build, padded):
    """Recomputation in a backward pass inside the context is not read a second time, and gradients are the same."""
    ids, mask = padded
    model = build("llama")
    with torch.no_grad(), collision_reader(model, hidden_layers=(1,)) as want:
        model(input_ids=ids, attention_mask=mask)
    model.train()
    model.activation_checkpointing_enable()
    with (
        torch.set_grad_enabled(not no_grad),
        collision_reader(model, hidden_layers=(1,)) as got,
    ):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        if not no_grad:
            loss.backward()
    assert torch.equal(got.statistic("collision"), want.statistic("collision"))
    assert torch.equal(got.hidden(), want.hidden()) and not got.hidden().requires_grad
    if not no_grad:
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.grad, gradient)


def test_flash_calls_are_read_from_a_two_dimensional_mask_and_a_window(build, padded, monkeypatch):
    """A stand-in kernel that takes what flash attention takes; its arguments must be understood as sdpa's mask is."""
    from transformers.modeling_utils import AttentionInterface

    ids, mask = padded
    model = build("mistral")
    with torch.no_grad(), ComputationReader(model, layers="all", statistics=("entropy",)) as want:
        logits = model(input_ids=ids, attention_mask=mask).logits

    def stand_in(module, query, key, value, attention_mask, sliding_window=None, scaling=None, **kwargs):
        assert attention_mask is None or attention_mask.ndim == 2
        i = torch.arange(query.shape[2])
        keep = (i <= i[:, None]) & (i > i[:, None] - sliding_window)
        keep = keep[None, None] if attention_mask is None else keep & attention_mask.bool()[:, None, None]
        return sdpa(module, query, key, value, keep, scaling=scaling)

    sdpa = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", stand_in)
    model.config._attn_implementation_internal = "flash_attention_2"
    with torch.no_grad(), ComputationReader(model, layers="all", statistics=("entropy",)) as got:
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[0], logits[0])
    real = mask.bool()
    torch.testing.assert_close(got.statistic("entropy")[real], want.statistic("entropy")[real], rtol=0, atol=1e-5)
    assert torch.equal(got.visible_keys()[real], want.visible_keys()[real])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_flex_attention_is_read_from_its_functions(name, build, padded, monkeypatch):
    """Masks, windows and softcap exist inside FlexAttention's functions only; eager attention says what they mean."""
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled_flex)
    ids, mask = padded
    read = {}
    for implementation in ("eager", "flex_attention"):
        model = build(name, implementation)
        with torch.no_grad(), ComputationReader(model, layers="all", statistics=NAMES, sink_tokens=2) as reader:
            model(input_ids=ids, attention_mask=mask)
        read[implementation] = reader
    real = mask.bool()
    for statistic in NAMES:
        got, want = (read[i].statistic(statistic)[real] for i in ("flex_attention", "eager"))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert torch.equal(read["flex_attention"].visible_keys()[real], read["eager"].visible_keys()[real])


def test_a_single_query_of_flash_attention_has_a_window_too():
    """A cache without windows keeps every key, and the kernel hides those before the window."""
    module = nn.Module()
    module.is_causal = True
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 20, 8)
    given = {"sinks": None, "documents": None, "rows": slice(0, 1), "past": 19, "cached": True}
    got = statistics_of_call("flash_attention_2", module, query, key, None, {"sliding_window": 4}, **given)
    want = statistics_of_call("flash_attention_2", module, query, key[:, :, -4:], None, {}, **given | {"past": 3})
    assert (got.visible_keys == 4).all()
    torch.testing.assert_close(got.collision, want.collision)


def test_paged_attention_is_refused_by_name(build):
    model = build("llama")
    model.config._attn_implementation_internal = "paged|sdpa"
    with pytest.raises(UnreadableModelError, match=r"paged.*sdpa"), collision_reader(model):
        pass


def test_no_attention_matrix_and_sdpa_stays_sdpa(build, padded, monkeypatch):
    ids, mask = padded
    calls = []
    original = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    monkeypatch.setattr(registry, "eager_function", lambda cls: pytest.fail("eager attention ran"))
    model = build("llama")
    with torch.no_grad(), collision_reader(model, layers="all"):
        output = model(input_ids=ids, attention_mask=mask)
    assert len(calls) == 2 and output.attentions is None and model.config._attn_implementation == "sdpa"


def test_autocast_does_not_coarsen_the_statistics(build, padded):
    """Under autocast the model's q and k are half precision; the reduction of them is not."""
    ids, mask = padded
    model = build("llama")
    seen = []
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        collision_reader(model, layers=(0,)) as reader,
    ):
        observe = reader._listener.observe
        reader._listener.observe = lambda *a: seen.append(a[2:4]) or observe(*a)
        model(input_ids=ids, attention_mask=mask)
    (query, key), sink = seen[0], torch.arange(20) < mask.argmax(-1)[:, None] + 1
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    hidden_keys = ~torch.ones(20, 20).tril().bool() | (sink | ~mask.bool())[:, None, None]
    want = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1).nan_to_num(0.0).square().sum(-1).transpose(1, 2)
    torch.testing.assert_close(reader.statistic("collision")[:, :, 0].double(), want, rtol=0, atol=1e-5)


def test_misuse_says_what_to_do(build, padded):
    ids, mask = padded
    model = build("llama")
    for options, match in (
        ({"statistics": ("colision",)}, "collision"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"positions": slice(0, 9, 2)}, "positions"),
        ({"routed_width": -1}, "routed_width"),
        ({"heads": "max"}, "heads"),
        ({"heads": ()}, "heads"),
        ({"layers": "upper"}, "middle"),
        ({"hidden_layers": (3,)}, "hidden_layers"),
    ):
        with pytest.raises(ConfigError, match=match):
            ComputationReader(model, **options)
    with pytest.raises(UnreadableModelError, match=r"layers \[5\]"):
        collision_reader(model, layers=(0, 5))
    with pytest.raises(UnreadableModelError, match="no Transformers model"):
        collision_reader(nn.Linear(2, 2))
    reader = collision_reader(model, positions=slice(-21, -1))
    with pytest.raises(EvidenceError, match="inside"):
        reader.statistic("collision")
    with pytest.raises(EvidenceError, match="not within a sequence of 20"), reader, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(ConfigError, match="collision"):
        reader.statistic("entropy")
    with (
        collision_reader(model, heads=(7,)),
        pytest.raises(ConfigError, match="heads 0 to 3"),
    ):
        model(input_ids=ids, attention_mask=mask)


def test_a_reader_can_be_used_again_but_not_twice_at_once(build, padded):
    ids, mask = padded
    model = build("llama")
    reader = collision_reader(model)
    for _ in range(2):
        with torch.no_grad(), reader:
            model(input_ids=ids, attention_mask=mask)
        assert reader.statistic("collision").shape[0] == 4
    with reader, pytest.raises(ConfigError, match="already"), reader:
        pass


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_calls_that_are_not_causal_are_not_read_as_causal(implementation, build):
    """A four-dimensional mask says all there is to say; eager attention without one hides nothing."""
    torch.manual_seed(0)
    module, query, key = build("llama").model.layers[0].self_attn, torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    both_ways = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    both_ways[..., 4] = False
    options = {"sinks": None, "documents": None, "rows": slice(0, 6)}
    mask = both_ways
    if implementation == "eager":  # which adds its mask to the scores
        mask = torch.zeros(both_ways.shape).masked_fill_(~both_ways, torch.finfo(torch.float32).min)
    stats = statistics_of_call(implementation, module, query, key, mask, {}, **options)
    assert (stats.visible_keys == 5).all()
    stats = statistics_of_call(implementation, module, query, key, None, {}, **options)
    assert stats.visible_keys[0, 0].tolist() == ([6] * 6 if implementation == "eager" else [1, 2, 3, 4, 5, 6])


def test_a_boolean_mask_under_eager_attention_is_read_as_it_is_computed(build, padded):
    """Transformers adds it to the scores, as 0 and 1: nothing is hidden."""
    ids = padded[0][:1]
    model, mask = build("llama", "eager"), torch.ones(1, 1, 20, 20).tril().bool()
    with torch.no_grad(), collision_reader(model, layers=(0,), sink_tokens=0) as reader:
        matrix = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions[0]
    want = matrix.square().sum(-1).transpose(1, 2)
    torch.testing.assert_close(reader.statistic("collision")[:, :, 0], want, rtol=0, atol=1e-5)
    assert (reader.visible_keys() == 20).all()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "falcon"])
def test_copies_made_inside_are_other_models(name, build, padded, tmp_path):
    """A deep copy and a pickled one carry no ear of the reader, then or later."""
    ids, mask = padded
    model = build(name)
    statistics = ("collision", "router_entropy") if name == "qwen3_moe" else ("collision",)
    with torch.no_grad(), ComputationReader(model, statistics=statistics, hidden_layers=(0,), routed_width=2) as reader:
        model(input_ids=ids, attention_mask=mask)
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        twin(input_ids=ids[:, :5])
    with torch.no_grad():
        for other in (twin, torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
            pickle.dumps(other)
    assert reader.forwards == 1 and reader.statistic("collision").shape[:2] == (4, 20)


def test_a_forward_that_fails_leaves_nothing_behind(build, padded):
    ids, mask = padded
    model = build("llama")
    with torch.no_grad(), collision_reader(model, layers="all", hidden_layers=(0, -1)) as reader:
        model(input_ids=ids, attention_mask=mask)
        handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda m, a: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(input_ids=ids + 1, attention_mask=mask)
        handle.remove()
        model(input_ids=ids[:2], attention_mask=mask[:2])
    assert reader.forwards == 2 and reader.statistic("collision").shape[0] == reader.hidden().shape[0] == 6
    torch.testing.assert_close(reader.statistic("collision")[4:], reader.statistic("collision")[:2], rtol=0, atol=1e-5)


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping's own error comes first")
def test_settings_as_people_mistake_them(build):
    model = build("llama")
    assert torch.equal(
        *(torch.tensor(ComputationReader(model, statistics=s).layers) for s in ("entropy", ("entropy",)))
    )
    for options, match in (
        ({"statistics": (lambda rows: rows.maximum,)}, r"AttentionStatistic\(name, function\)"),
        ({"statistics": ("colision",)}, "collision.*router_entropy"),
        ({"layers": 2}, r"\(2,\)"),
        ({"hidden_layers": -1}, r"\(-1,\)"),
        ({"sink_tokens": 1.5}, "sink_tokens=1.5"),
    ):
        with pytest.raises(ConfigError, match=match):
            ComputationReader(model, **options)
    with pytest.raises(UnreadableModelError, match="from_pretrained"):
        ComputationReader("bundled")
    for arguments in (("", max), ("x", 3)):
        with pytest.raises(ConfigError, match="a name and a function"):
            AttentionStatistic(*arguments)
    with pytest.raises(ConfigError, match="a statistic of ours"):
        ComputationReader(model, statistics=(AttentionStatistic("entropy", lambda rows: rows.maximum),))
