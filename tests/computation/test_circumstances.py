"""Packed rows, caches, compiled models, threads: what is read there is what a plain forward of the same tokens says."""

import threading

import pytest
import torch
from torch import nn

from comppo.computation import AttentionStatistic, ComputationReader
from comppo.computation.cost import peak_bytes
from comppo.computation.store import Store
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

NAMES = ("collision", "entropy", "maximum", "sink_mass", "distance")


def collision_reader(model, **settings):
    return ComputationReader(model, statistics=("collision",), **settings)


def read(model, ids, mask=None, **settings):
    """A plain forward of whole rows."""
    settings = {"layers": "all", "statistics": NAMES, "hidden_layers": (1, -1)} | settings
    with torch.no_grad(), ComputationReader(model, **settings) as reader:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return reader


def assert_same(got, want, part=slice(None), atol=1e-5, statistics=NAMES):
    for name in statistics:
        torch.testing.assert_close(got.statistic(name), want.statistic(name)[part], rtol=0, atol=atol)
    assert torch.equal(got.visible_keys(), want.visible_keys()[part])


# Packed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_each_document_of_a_packed_row_has_its_own_sinks(name, implementation, build, padded, monkeypatch):
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled_flex)
    ids = padded[0][:1]
    lengths = (9, 1, 2, 8)
    model = build(name, implementation)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    settings = {"layers": "all", "statistics": NAMES, "sink_tokens": 2, "routed_width": 3}
    with torch.no_grad(), ComputationReader(model, **settings) as packed:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        alone = read(model, ids[:, part], **settings)
        for statistic in NAMES:
            got, want = packed.statistic(statistic)[:, part], alone.statistic(statistic)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(packed.routed()[:, part], alone.routed(), rtol=0, atol=1e-5)
        start += n


def uncompiled_flex(query, key, value, training=False, **kwargs):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, **kwargs)


def test_packed_rows_of_flash_attention(build, padded, monkeypatch):
    """A stand-in that keeps documents apart as flash attention does: by positions, or by cumulative lengths."""
    from transformers.modeling_utils import AttentionInterface

    ids, model = padded[0][:1], build("llama")
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    documents = torch.arange(20) >= 12
    with torch.no_grad(), ComputationReader(model, layers="all", statistics=NAMES) as want:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    sdpa = AttentionInterface._global_mapping["sdpa"]

    def stand_in(module, query, key, value, attention_mask, scaling=None, **kwargs):
        assert attention_mask is None
        keep = torch.ones(20, 20).tril().bool() & (documents == documents[:, None])
        return sdpa(module, query, key, value, keep[None, None], scaling=scaling)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", stand_in)
    model.config._attn_implementation_internal = "flash_attention_2"
    for lengths in ({}, {"cu_seq_lens_q": torch.tensor([0, 12, 20])}):
        with torch.no_grad(), ComputationReader(model, layers="all", statistics=NAMES) as got:
            model(input_ids=ids, position_ids=positions, use_cache=False, **lengths)
        assert_same(got, want)


def test_positions_that_begin_anew_without_keeping_documents_apart_are_one_sequence(build, padded):
    """With a mask or a cache Transformers lets such positions attend across: there is one sink then."""
    ids, mask = padded[0][:1], torch.ones(1, 20, dtype=torch.long)
    model = build("llama")
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    for more in ({"attention_mask": mask, "use_cache": False}, {"use_cache": True}):
        with torch.no_grad(), collision_reader(model, layers="all") as reader:
            model(input_ids=ids, position_ids=positions, **more)
        assert reader.visible_keys()[0, :, 0].tolist() == list(range(1, 21))
        with torch.no_grad():
            matrix = eager_matrix(build, ids, positions, more)
        rest = matrix[..., 1:] / matrix[..., 1:].sum(-1, keepdim=True).clamp_min(1e-30)
        want = rest.square().sum(-1).transpose(1, 2)
        torch.testing.assert_close(reader.statistic("collision")[:, :, 0], want, rtol=0, atol=1e-5)


def eager_matrix(build, ids, positions, more):
    return build("llama", "eager")(input_ids=ids, position_ids=positions, output_attentions=True, **more).attentions[0]


def test_a_four_dimensional_mask_tells_documents_and_padding(build, padded):
    """As data collators make it for packed rows: row 0 two documents, row 1 left padding."""
    ids, model = padded[0][:2], build("llama")
    documents = torch.stack([torch.arange(20) >= 12, torch.arange(20) >= 7])
    visible = torch.ones(20, 20).tril().bool() & (documents[:, :, None] == documents[:, None])
    visible[1, :7] = False
    additive = torch.zeros(2, 1, 20, 20).masked_fill_(~visible[:, None], torch.finfo(torch.float32).min)
    for mask in (visible[:, None], additive):
        with torch.no_grad(), ComputationReader(model, layers=(0,), statistics=("sink_mass",)) as reader:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        mass = reader.statistic("sink_mass")
        assert (mass[0, [0, 12]] == 1).all() and (mass[0, 13:] < 1).all() and (mass[1, 7] == 1).all()
        assert (mass[1, :7] == 0).all() and (mass[1, 8:] < 1).all()


# Caches -----------------------------------------------------------------------------------------------------------


def test_a_position_that_a_mask_hides_from_all_begins_no_document(build, padded):
    model, ids, visible = build("llama", "eager"), padded[0][:1, :12], torch.ones(12, 12, dtype=torch.bool).tril()
    visible[:, 5] = False
    visible[5, 5] = True
    with torch.no_grad(), collision_reader(model, layers="all") as reader:
        hidden = torch.zeros(12, 12).masked_fill(~visible, torch.finfo(torch.float32).min)  # eager adds its mask
        matrices = model(ids, attention_mask=hidden[None, None], output_attentions=True).attentions
    for i, matrix in enumerate(matrices):
        got = reader.statistic("sink_mass")[:, :, i]
        torch.testing.assert_close(got, matrix[..., 0].transpose(1, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_sequence_that_grows_reads_like_the_whole(kind, name, implementation, build, padded):
    """Prefill of 9 tokens, then 3 and 1 at a time; left padding; a window of 6 in mistral and half of gemma2; bloom
    makes its own scores."""
    from transformers import DynamicCache, StaticCache

    if name in ("gemma2", "bloom") and implementation == "sdpa":
        pytest.skip("softcap has no sdpa, nor has bloom")
    ids, mask = padded[0][:2], padded[1][:2]
    model = build(name, implementation)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)

    def places(part):
        return {} if name == "bloom" else {"position_ids": positions[:, part]}  # its positions are in its scores

    room = 32 if name == "bloom" and kind == "static" else 0  # it makes its biases as wide as the mask
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=32)
    settings = {"layers": "all", "statistics": NAMES, "hidden_layers": (1, -1), "routed_width": 4}
    with torch.no_grad(), ComputationReader(model, **settings) as whole:
        model(input_ids=ids, attention_mask=mask, use_cache=False, **places(slice(None)))
    start = 0
    with torch.no_grad(), ComputationReader(model, **settings) as grown:
        for stop in (9, 12, *range(13, 21)):
            model(
                input_ids=ids[:, start:stop],
                attention_mask=nn.functional.pad(mask[:, :stop], (0, room - stop)) if room else mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
                **places(slice(start, stop)),
            )
            start = stop
    assert grown.forwards == 10 and grown.statistic("collision").shape == (2, 20, 2, 4)
    real = mask.bool()
    for statistic in NAMES:
        got, want = grown.statistic(statistic), whole.statistic(statistic)
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-5)
    assert torch.equal(grown.visible_keys()[real], whole.visible_keys()[real])
    torch.testing.assert_close(grown.hidden()[real], whole.hidden()[real], rtol=0, atol=1e-4)
    after_real = real & nn.functional.pad(real, (1, 0))[:, :-1]  # else the change is that from padding
    got, want = (r.hidden_change()[after_real] for r in (grown, whole))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(grown.routed()[real], whole.routed()[real], rtol=0, atol=1e-4)


def test_generation_is_read_as_it_happens(build, padded):
    """Two prompts of several lengths, one after the other, each growing by itself."""
    ids, mask = padded[0][:2], padded[1][:2]
    model = build("llama")
    with ComputationReader(model, layers="all", statistics=NAMES) as reader:
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=[])
    assert reader.statistic("collision").shape == (2, 25, 2, 4)
    grown = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    positions = (grown.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), ComputationReader(model, layers="all", statistics=NAMES) as whole:
        model(input_ids=out[:, :25], attention_mask=grown, position_ids=positions, use_cache=False)
    for statistic in NAMES:
        got, want = (r.statistic(statistic)[grown.bool()] for r in (reader, whole))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    with (
        pytest.raises(EvidenceError, match="adds to a cache"),
        collision_reader(model, positions=slice(0, 20)),
    ):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("start", [1, 2, 5])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_cache_that_the_model_made_itself_grows_like_one_it_was_given(start, as_tuple, build, padded):
    model, ids = build("llama"), padded[0][:2, :6]
    settings = {"layers": "all", "statistics": NAMES, "hidden_layers": (1, -1), "routed_width": 3}
    with torch.no_grad(), ComputationReader(model, **settings) as reader:
        output = model.model(ids[:, :start], return_dict=not as_tuple)
        for t in range(start, ids.shape[1]):
            output = model.model(ids[:, t : t + 1], past_key_values=output[1], return_dict=not as_tuple)
    whole = read(model, ids, routed_width=3)
    assert_same(reader, whole)
    torch.testing.assert_close(reader.routed(), whole.routed(), rtol=0, atol=1e-5)
    torch.testing.assert_close(reader.hidden_change(), whole.hidden_change(), rtol=0, atol=1e-5)


def test_a_cache_that_is_cut_between_forwards_is_refused(build, padded):
    ids, model = padded[0][:1], build("llama")
    with torch.no_grad(), ComputationReader(model):
        cache = model(input_ids=ids[:, :10], use_cache=True).past_key_values
        cache.crop(-4)
        assert cache.get_seq_length() == 6
        with pytest.raises(EvidenceError, match=r"cut from 10 to 6 positions.*speculative"):
            model(input_ids=ids[:, 6:], past_key_values=cache)


def test_a_cache_that_was_begun_before_makes_rows_of_its_own(build, padded):
    """Two continuations of one cached prompt, in one context."""
    import copy

    from transformers import DynamicCache

    ids = padded[0][:1]
    model = build("llama")
    whole = read(model, ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :12], past_key_values=cache, use_cache=True)
        with ComputationReader(model, layers="all", statistics=NAMES, hidden_layers=(-1,)) as reader:
            for _ in range(2):
                model(input_ids=ids[:, 12:], past_key_values=copy.deepcopy(cache), use_cache=True)
    assert reader.statistic("collision").shape == (2, 8, 2, 4)
    for row in range(2):
        for name in NAMES:
            got, want = reader.statistic(name)[row], whole.statistic(name)[0, 12:]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    with torch.no_grad(), ComputationReader(model, routed_width=2), pytest.raises(EvidenceError, match="begun before"):
        model(input_ids=ids[:, 12:], past_key_values=copy.deepcopy(cache), use_cache=True)


# Compiled, concurrent, extreme ------------------------------------------------------------------------------------


def test_compiled_models_are_not_compiled_again_with_each_reading(build, padded):
    """The first reading compiles what it needs; further readings, whatever they read, compile nothing."""
    from torch._dynamo.utils import counters

    ids, mask = padded
    model = build("llama")
    kinds = ({}, {"hidden_layers": (1, -1)}, {"routed_width": 4, "layers": (1,)})
    want = [read(model, ids, mask, **kind) for kind in kinds]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
    graphs = []
    for turn in range(6):
        kind = {"layers": "all", "statistics": NAMES} | kinds[turn % 3]
        with torch.no_grad(), ComputationReader(compiled, **kind) as reader:
            assert torch.equal(compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits, plain)
        with torch.no_grad():
            compiled(input_ids=ids, attention_mask=mask, use_cache=False)
        graphs.append(counters["stats"]["unique_graphs"])
        assert_same(reader, want[turn % 3])
        if turn % 3 == 1:
            torch.testing.assert_close(reader.hidden(), want[1].hidden(), rtol=0, atol=1e-5)
        if turn % 3 == 2:
            torch.testing.assert_close(reader.routed(), want[2].routed(), rtol=0, atol=1e-5)
    assert graphs[0] > 1 and len(set(graphs)) == 1
    torch._dynamo.reset()


def test_threads_and_models_do_not_see_each_other(build, padded):
    """Four threads read two models at once, while a fifth runs one of them without reading."""
    ids, mask = padded
    models = [build("llama"), build("qwen3")]
    want = [read(model, ids, mask) for model in models]
    barrier, stop, failures = threading.Barrier(4), threading.Event(), []

    def run():
        with torch.no_grad():
            while not stop.is_set():
                models[0](input_ids=ids[:1, :5])

    def reads(index):
        try:
            for _ in range(5):
                barrier.wait(30)
                got = read(models[index % 2], ids, mask)
                assert got.forwards == 1
                assert_same(got, want[index % 2])
                assert torch.equal(got.hidden(), want[index % 2].hidden())
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    unread = threading.Thread(target=run)
    readers = [threading.Thread(target=reads, args=(i,)) for i in range(4)]
    unread.start()
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    unread.join()
    assert not failures


def test_a_sink_that_takes_nearly_everything_and_rows_without_keys(build, padded):
    """Keys of the first token made 30 times as long: the rest of each row keeps its digits. Padded rows read 0."""
    ids, mask = padded
    model = build("llama").double()

    def long_keys(module, args, output):
        output = output.clone()
        output[torch.arange(4), mask.argmax(-1)] *= 30
        return output

    readings = []
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        handles = [layer.self_attn.k_proj.register_forward_hook(long_keys) for layer in model.model.layers]
        readings.append(read(model, ids, mask, statistics=("collision", "entropy", "maximum", "sink_mass")))
        for handle in handles:
            handle.remove()
    real = mask.bool()
    exact, single = readings
    others = (exact.visible_keys() > 3)[..., None] & real[:, :, None, None]
    assert (exact.statistic("sink_mass") > 1 - 1e-6)[others.expand(-1, -1, -1, 4)].any()
    for name in ("collision", "entropy", "maximum"):
        got, want = single.statistic(name)[real], exact.statistic(name)[real]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert (single.statistic(name)[~real][:7] == 0).all()
    assert (single.visible_keys()[1, :7] == 0).all()


def test_a_module_that_attends_twice_is_refused_even_where_memory_is_used_again(build, padded):
    ids, mask = padded
    model = build("llama")
    attention = model.model.layers[0].self_attn
    once = attention.forward

    def twice(hidden_states, **inputs):
        once(hidden_states=hidden_states, **inputs)
        return once(hidden_states=hidden_states * 2, **inputs)

    attention.forward = twice
    for _ in range(20):
        with pytest.raises(UnreadableModelError, match="attended twice"):
            read(model, ids, mask, hidden_layers=())


def test_statistics_of_the_user_s_own(build, padded):
    ids, mask = padded
    model = build("llama")
    contrast = AttentionStatistic("contrast", lambda rows: rows.rest_maximum * rows.rest_visible_keys)
    spread = AttentionStatistic("spread", lambda rows: rows.entropy - rows.rest_entropy + rows.distance)
    reader = read(model, ids, mask, statistics=("collision", contrast, spread, "effective_keys"), heads=(1,))
    got = reader.statistic(contrast)
    assert got.shape == (4, 20, 2, 1) and torch.equal(got, reader.statistic("contrast"))
    plain = read(model, ids, mask, statistics=("maximum",), heads=(1,)).statistic("maximum")
    torch.testing.assert_close(got, plain * (reader.visible_keys() - 1).clamp_min(0)[..., None])
    some = reader.statistic("collision") > 0
    torch.testing.assert_close(
        (reader.statistic("effective_keys") * reader.statistic("collision"))[some], some[some] * 1.0
    )
    torch.testing.assert_close(reader.summary(contrast), got.mean((2, 3)))
    with pytest.raises(ConfigError, match="named 'collision'"):
        ComputationReader(model, statistics=("collision", AttentionStatistic("collision", lambda rows: rows.maximum)))
    broken = AttentionStatistic("broken", lambda rows: rows.maximum.mean(1))
    with pytest.raises(ConfigError, match="one value per row, head and token"):
        read(model, ids, mask, statistics=(broken,))


def test_what_only_a_running_forward_needs_is_let_go_at_the_end(build, padded):
    reader = read(build("llama"), padded[0], padded[1], routed_width=3)
    listener = reader._listener
    assert not listener._features and listener._sequences is None and listener._marks is None
    assert reader.routed().shape == (4, 20, 2, 3)


@pytest.mark.parametrize(("batches", "parts", "copies"), [(1, 1, 0), (4, 1, 1), (1, 16, 1)])
def test_a_result_is_put_together_without_a_second_copy(batches, parts, copies):
    store = Store()
    for _ in range(batches):
        for part in range(parts):
            store.begin(new_rows=part == 0)
            store.add("hidden", torch.zeros(2, 1024 // parts, 256))
    held = batches * 2 * 1024 * 256 * 4
    assert peak_bytes(lambda: store.whole("hidden")) == copies * held


def test_projections_do_not_depend_on_autocast_or_torch_s_defaults():
    from comppo.computation.routed import _matrix, project

    hidden = torch.randn(2, 3, 32)
    want = project(hidden, 4, 1)
    _matrix.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            got = project(hidden, 4, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, want)


@pytest.mark.parametrize("name", ["visible_keys", "routed", "hidden", "router_entropy"])
def test_a_user_s_statistic_may_be_called_like_what_else_is_read(name, build, padded):
    ids = padded[0][:2]
    own = AttentionStatistic(name, lambda rows: rows.collision * 2.0)
    reader = read(build("llama"), ids, statistics=(own, "whole_collision"), routed_width=3, hidden_layers=(1,))
    assert torch.equal(reader.statistic(own), 2.0 * reader.statistic("whole_collision"))
    assert reader.visible_keys().shape == (2, 20, 2) and reader.routed().shape == (2, 20, 2, 3)
    assert torch.equal(reader.hidden(), read(build("llama"), ids, hidden_layers=(1,)).hidden())


def test_routers_are_read_beside_attention(build, padded):
    ids, mask = padded
    model = build("qwen3_moe")
    logits = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda m, args, out: logits.append(args[0] @ m.weight.T))
        for layer in model.model.layers
    ]
    names = ("collision", "router_entropy", "router_top_k_mass")
    with torch.no_grad(), ComputationReader(model, layers="all", statistics=names, positions=slice(-7, -1)) as reader:
        for half in (slice(0, 2), slice(2, 4)):
            model(input_ids=ids[half], attention_mask=mask[half], use_cache=False)
    for handle in handles:
        handle.remove()
    p = [torch.cat([logits[i], logits[i + 2]]).view(4, 20, -1)[:, -7:-1].softmax(-1) for i in range(2)]
    entropy = torch.stack([-(q * q.log()).sum(-1) for q in p], 2)
    top = torch.stack([q.topk(2).values.sum(-1) for q in p], 2)
    torch.testing.assert_close(reader.statistic("router_entropy"), entropy[..., None])
    torch.testing.assert_close(reader.statistic("router_top_k_mass"), top[..., None])
    torch.testing.assert_close(reader.summary("router_entropy"), entropy.mean(-1))
    assert reader.router_layers == (0, 1) and reader.statistic("collision").shape == (4, 6, 2, 4)
    only = read(model, ids, mask, statistics=("router_entropy",), hidden_layers=())
    assert only.layers == () and only.statistic("router_entropy").shape == (4, 20, 2, 1)
    with pytest.raises(UnreadableModelError, match="has no experts"):
        ComputationReader(build("llama"), statistics=("router_entropy",))


def test_routed_summaries_average_earlier_states(build, padded):
    """Against the matrices of eager attention; the projection is the same in every process."""
    from comppo.computation.routed import project

    ids, mask = padded
    model = build("llama", "eager")
    for heads, pick in ((None, [0, 1, 2, 3]), ((2, 0), [2, 0])):
        with torch.no_grad(), ComputationReader(model, layers=(1,), heads=heads, routed_width=5) as reader:
            output = model(
                input_ids=ids, attention_mask=mask, use_cache=False, output_attentions=True, output_hidden_states=True
            )
        matrix = output.attentions[1].double()
        sink = torch.arange(20) == mask.argmax(-1)[:, None]
        rest = matrix.masked_fill(sink[:, None, None], 0.0)
        rest = rest / rest.sum(-1, keepdim=True)
        want = torch.einsum("bhqk,bkw->bqw", rest[:, pick], project(output.hidden_states[1], 5, 1).double()) / len(pick)
        usable = mask.bool() & ~sink
        got = reader.routed()
        assert got.shape == (4, 20, 1, 5)
        torch.testing.assert_close(got[:, :, 0][usable].double(), want[usable], rtol=0, atol=1e-4)
    hidden = torch.ones(1, 1, 4)
    torch.testing.assert_close(project(hidden, 3, 2), project(7 * hidden, 3, 2))
    states = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0))
    projected = project(states, 48, 0)[0]
    unit = states[0] / states[0].square().mean(-1, keepdim=True).sqrt()
    ratio = torch.pdist(projected).square() / torch.pdist(unit).square() * 64 / 48
    assert abs(float(ratio.mean()) - 1) < 0.1
    assert project(states, 48, 0)[0, 0, 0] != project(states, 48, 1)[0, 0, 0]
    assert nn.functional.cosine_similarity(projected[:-1], projected[1:]).abs().max() < 1
