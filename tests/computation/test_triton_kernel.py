"""The Triton kernel against materialised attention in float64 and against the torch path.

The kernel runs in Triton's interpreter, in a process of its own: the interpreter must be chosen before triton is first
imported, for the whole process. A last test compiles it for GPUs that are not there.
"""

import importlib.util
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comppo.computation import attention_statistics
from comppo.computation.attention_rows import INVISIBLE, AttentionStatistics

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

WORKER = """
import os, pickle, sys
if not os.environ.get("COMPPO_UNHOOKED"):
    from jaxtyping import install_import_hook
    install_import_hook(["comppo.computation"], "beartype.beartype")
import torch
from comppo.computation import triton_launch
answers, sys.stdout = sys.stdout.buffer, sys.stderr
while True:
    try:
        name, args, options = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        answer = True, getattr(triton_launch, name)(*args, **options)
    except Exception as error:
        answer = False, error
    pickle.dump(answer, answers)
    answers.flush()
"""


@pytest.fixture(scope="module")
def interpreted():
    """Calls a function of the module, by name, where triton interprets its kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )

    def call(name, *args, **options):
        pickle.dump((name, args, options), process.stdin)
        process.stdin.flush()
        fine, answer = pickle.load(process.stdout)
        if not fine:
            raise answer
        return answer

    yield call
    process.stdin.close()
    process.wait(timeout=30)


def visible(query, key, *, mask=None, causal=True, window=None, documents=None):
    """(rows, heads, queries, keys) bool, one comparison at a time."""
    n_rows, n_heads, queries = query.shape[:3]
    keys = key.shape[2]
    place, k = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    keep = torch.ones(n_rows, n_heads, queries, keys, dtype=torch.bool)
    if causal:
        keep &= k <= place
    if window is not None:
        keep &= k > place - window
    if documents is not None:
        keep &= (documents[:, place[:, 0], None] == documents[:, None])[:, None]
    if mask is not None:
        keep &= mask if mask.dtype == torch.bool else mask > INVISIBLE
    return keep


def materialised(
    query, key, *, scale, mask=None, softcap=None, sinks=None, s_aux=None, features=None, rows=None, **seen
):
    """Every statistic from whole matrices of probabilities, in float64."""
    keep = visible(query, key, mask=mask, **{k: v for k, v in seen.items() if k in ("causal", "window", "documents")})
    scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double()
    sinks = torch.zeros(query.shape[0], key.shape[2], dtype=torch.bool) if sinks is None else sinks
    is_sink = sinks[:, None, None]
    away = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2] - torch.arange(key.shape[2])
    want = {}
    for prefix, kept in (("", keep), ("rest_", keep & ~is_sink)):
        p = scores.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0.0)
        want[f"{prefix}collision"], want[f"{prefix}maximum"] = p.square().sum(-1), p.amax(-1)
        want[f"{prefix}visible_keys"] = kept.sum(-1).double()
        want[f"{prefix}entropy"] = -torch.xlogy(p, p).sum(-1)
        want[f"{prefix}distance"] = (p * away).sum(-1)
    if features is not None:
        want["rest_features"] = p @ features.double()[:, None]
    learned = torch.full((query.shape[1],), -torch.inf) if s_aux is None else s_aux
    learned = learned.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    everything = torch.cat([scores.masked_fill(~keep, -torch.inf), learned], -1).softmax(-1).nan_to_num(0.0)
    mass = (everything[..., :-1] * is_sink).sum(-1) + everything[..., -1]
    want["sink_mass"] = torch.where(keep.any(-1), mass, 0.0)
    return {name: values[:, :, rows or slice(None)] for name, values in want.items()}


def assert_equal(got, want, *, atol=5e-6, rtol=2e-6, distance_atol=5e-6):
    """Every field that `got` has. The torch path measures distances from another query, and rounds them so."""
    assert isinstance(got, AttentionStatistics)
    for name in AttentionStatistics.__slots__:
        value = getattr(got, name)
        if value is not None:
            assert value.dtype == torch.float32
            torch.testing.assert_close(
                value.double(),
                want[name].double(),
                atol=distance_atol if "distance" in name else atol,
                rtol=rtol,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    for name in ("collision", "maximum", "rest_collision", "rest_maximum"):
        assert getattr(got, name).numel() == 0 or getattr(got, name).max() <= 1.0 + 1e-6


def check(interpreted, query, key, **options):
    """The kernel equals the matrices and the torch path; returns what it gave."""
    got = interpreted("triton_statistics", query, key, **options)
    assert (got.entropy is None) == (not options.get("entropy", True))
    assert (got.distance is None) == (not options.get("distance", False))
    assert (got.rest_features is None) == (options.get("features") is None)
    one_sign = options.get("causal", True)  # else distances of both signs cancel
    assert_equal(got, materialised(query, key, **options), distance_atol=5e-6 if one_sign else 1e-4)
    torch_path = attention_statistics(query, key, **options)
    for name in AttentionStatistics.__slots__:
        assert (getattr(got, name) is None) == (getattr(torch_path, name) is None)
    assert_equal(got, {n: getattr(torch_path, n) for n in AttentionStatistics.__slots__}, distance_atol=1e-4)
    return got


def qk(heads, kv_heads, queries, keys, width, *, rows=2, dtype=torch.float32):
    """Queries and keys whose scores at scale 1 have a standard deviation of 2."""
    torch.manual_seed(100 * keys + width)
    query = torch.randn(rows, heads, queries, width) * 2 * width**-0.5
    return query.to(dtype), torch.randn(rows, kv_heads, keys, width).to(dtype)


def first_keys(rows, keys):
    """The first key of each row, and one further key, as sinks."""
    sinks = torch.zeros(rows, keys, dtype=torch.bool)
    sinks[:, 0] = sinks[-1, keys // 2] = True
    return sinks


@needs_triton
@pytest.mark.parametrize("keys", [1, 63, 65, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2)])
def test_awkward_lengths_and_shared_key_heads(interpreted, keys, heads, kv_heads):
    query, key = qk(heads, kv_heads, keys, keys, 16)
    check(interpreted, query, key, scale=1.0, sinks=first_keys(2, keys), distance=True)


@needs_triton
@pytest.mark.parametrize("width", [5, 16, 24, 64, 80, 192, 300])
def test_head_widths(interpreted, width):
    query, key = qk(2, 1, 70, 70, width, rows=1)
    check(interpreted, query, key, scale=1.0)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(interpreted, dtype):
    query, key = qk(4, 2, 70, 70, 24, dtype=dtype)
    check(interpreted, query, key, scale=1.0, sinks=first_keys(2, 70), features=torch.randn(2, 70, 5).to(dtype))


@needs_triton
@pytest.mark.parametrize("window", [1, 7, 64, 200])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_windows_and_softcap(interpreted, window, softcap):
    query, key = qk(4, 2, 130, 130, 16, rows=1)
    check(interpreted, query, key, scale=1.0, window=window, softcap=softcap, distance=True)


@needs_triton
@pytest.mark.parametrize(("kv_heads", "mask_rows", "mask_heads"), [(1, 1, 6), (1, 2, 1), (2, 1, 1), (2, 2, 6)])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_with_holes_and_rows_without_keys(interpreted, kv_heads, mask_rows, mask_heads, additive):
    query, key = qk(6, kv_heads, 100, 100, 16)
    mask = torch.rand(mask_rows, mask_heads, 100, 100) < 0.4
    mask[:, :, 40:60] = False
    mask[..., :30] = False
    mask[:, : mask_heads // 2, :, :70] = False  # half of several heads see less
    if additive:
        mask = torch.randn(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        mask[..., 99, 3] = INVISIBLE  # as much hidden
    got = check(interpreted, query, key, scale=1.0, mask=mask, causal=False, sinks=first_keys(2, 100), distance=True)
    for name in AttentionStatistics.__slots__:
        values = getattr(got, name)
        assert values is None or (values[:, :, 40:60] == 0).all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masks(interpreted, dtype):
    query, key = qk(2, 2, 50, 50, 16)
    mask = torch.zeros(2, 1, 50, 50).masked_fill(torch.rand(2, 1, 50, 50) < 0.5, torch.finfo(dtype).min).to(dtype)
    check(interpreted, query, key, scale=1.0, mask=mask)


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents(interpreted, causal):
    """Of lengths that end inside and at the end of a block, one of them a single key, numbered in no order."""
    query, key = qk(4, 2, 150, 150, 16)
    documents = torch.tensor([7, 3, 9, 0]).repeat_interleave(torch.tensor([64, 1, 33, 52]))
    documents = torch.stack([documents, documents.flip(0)])
    sinks = documents.diff(dim=1, prepend=torch.full((2, 1), -1)) != 0
    check(interpreted, query, key, scale=1.0, causal=causal, documents=documents, sinks=sinks, distance=True)


@needs_triton
@pytest.mark.parametrize("rows", [slice(0, 1), slice(31, 97), slice(-1, None), slice(40, 40)])
def test_ranges_of_queries(interpreted, rows):
    query, key = qk(4, 2, 100, 100, 16)
    options = {"scale": 1.0, "rows": rows, "distance": True}
    check(interpreted, query, key, **options, sinks=first_keys(2, 100), features=torch.randn(2, 100, 3))
    check(interpreted, query, key, **options, mask=torch.rand(2, 1, 100, 100) < 0.5)
    check(interpreted, query, key, **options, documents=(torch.arange(100) // 35).expand(2, -1), window=20)


@needs_triton
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_more_keys_than_queries(interpreted, queries):
    """A growing cache: the queries are the last ones. With one query, decoding."""
    query, key = qk(4, 2, queries, 90, 16)
    check(interpreted, query, key, scale=1.0, distance=True, sinks=first_keys(2, 90))
    documents = (torch.arange(90) // 45).expand(2, -1)
    check(interpreted, query, key, scale=1.0, documents=documents, mask=torch.rand(1, 1, queries, 90) < 0.5)


@needs_triton
def test_any_strides(interpreted):
    """Views as models make them (positions before heads), width not the fastest axis, and masks that were expanded."""
    query, key = qk(70, 70, 6, 2, 16)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    assert query.shape == (2, 6, 70, 16) and key.shape == (2, 2, 70, 16)
    options = {"scale": 1.0, "distance": True}
    check(interpreted, query, key, **options)
    check(interpreted, query.mT.contiguous().mT, key.mT.contiguous().mT, **options)
    padding = torch.arange(70) >= torch.tensor([[0], [20]])
    check(interpreted, query, key, **options, mask=padding[:, None, None].expand(-1, 6, 70, -1))
    check(interpreted, query, key, **options, mask=(torch.rand(70, 70) < 0.5).T.expand(2, 6, -1, -1))
    check(interpreted, query, key, **options, sinks=first_keys(1, 70).expand(2, -1))
    check(interpreted, query, key, **options, features=torch.randn(2, 4, 70).mT)


@needs_triton
def test_learned_sinks(interpreted):
    query, key = qk(4, 2, 50, 50, 16)
    s_aux = torch.tensor([-3.0, 0.0, 2.0, 60.0])
    check(interpreted, query, key, scale=1.0, s_aux=s_aux)
    check(interpreted, query, key, scale=1.0, s_aux=s_aux.bfloat16(), sinks=first_keys(2, 50))
    nothing = check(interpreted, query, key, scale=1.0, s_aux=s_aux, mask=torch.zeros(1, 1, 50, 50).bool())
    assert (nothing.sink_mass == 0).all()


@needs_triton
@pytest.mark.parametrize("width", [1, 16, 33, 64])
def test_routed_features_leave_the_sinks_out(interpreted, width):
    query, key = qk(4, 2, 70, 70, 16)
    check(interpreted, query, key, scale=1.0, sinks=first_keys(2, 70), features=torch.randn(2, 70, width))


@needs_triton
@pytest.mark.parametrize("sink", [0, 77])
def test_a_sink_with_all_but_1e_17_of_the_mass_takes_no_digits_from_the_rest(interpreted, sink):
    """Its score is 40 above the others: subtracting it from the whole would leave nothing."""
    query, key = qk(4, 2, 130, 130, 16)
    mask = torch.zeros(1, 1, 130, 130)
    mask[..., sink] = 40.0
    sinks = torch.zeros(2, 130, dtype=torch.bool)
    sinks[:, sink] = True
    options = {"scale": 0.5, "mask": mask, "sinks": sinks, "distance": True, "features": torch.rand(2, 130, 4)}
    got, want = check(interpreted, query, key, **options), materialised(query, key, **options)
    assert got.sink_mass[:, :, sink:].min() == 1.0
    for name in ("rest_collision", "rest_maximum", "rest_distance", "rest_features"):
        torch.testing.assert_close(getattr(got, name).double(), want[name], rtol=1e-5, atol=0)


@needs_triton
def test_distances_do_not_cancel_far_from_the_start(interpreted):
    """The last 2 of 3000 queries, each of which reads little but its own key: distances near 0, not 3000 - 3000."""
    key = torch.zeros(1, 1, 3000, 16)
    key[..., -2, 0] = key[..., -1, 1] = 1.0
    query = torch.zeros(1, 1, 2, 16)
    query[..., 0, 0] = query[..., 1, 1] = 30.0
    options = {"scale": 1.0, "distance": True}
    got, want = interpreted("triton_statistics", query, key, **options), materialised(query, key, **options)
    assert want["distance"].max() < 1e-6
    torch.testing.assert_close(got.distance.double(), want["distance"], rtol=1e-5, atol=0)


@needs_triton
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_combination(interpreted, data):
    draw = data.draw
    n_rows, kv_heads, keys = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 80))
    heads, queries = kv_heads * draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, keys))
    query, key = qk(heads, kv_heads, queries, keys, draw(st.sampled_from([16, 24])), rows=n_rows)
    causal, kind = draw(st.booleans()), draw(st.sampled_from(["none", "boolean", "additive"]))
    mask = torch.rand(draw(st.sampled_from([1, n_rows])), draw(st.sampled_from([1, heads])), queries, keys) < 0.6
    if kind == "additive":
        mask = torch.randn(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    start = draw(st.integers(0, queries))
    check(
        interpreted,
        query,
        key,
        scale=draw(st.sampled_from([0.3, 1.0])),
        mask=None if kind == "none" else mask,
        causal=causal,
        window=draw(st.none() | st.integers(1, 70)) if causal else None,
        softcap=draw(st.none() | st.just(2.0)),
        sinks=draw(st.none() | st.just(torch.rand(n_rows, keys) < 0.1)),
        documents=draw(st.none() | st.just(torch.randint(0, 3, (n_rows, keys)).sort(1).values)),
        rows=slice(start, draw(st.integers(start, queries))),
        s_aux=draw(st.none() | st.just(torch.randn(heads))),
        features=draw(st.none() | st.just(torch.randn(n_rows, keys, 3))),
        entropy=draw(st.booleans()),
        distance=draw(st.booleans()),
    )


@needs_triton
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("group", [3, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_bounded_by_the_first_and_last_key_that_they_see(interpreted, several, group, causal):
    """So hidden stretches at both ends cost nothing: padding, other documents, the part above a mask's diagonal."""
    block_rows, queries, keys = 16, 100, 110
    mask = torch.rand(2, 2 * group if several else 1, queries, keys) < 0.1
    mask[0, :, :, :60] = False
    mask[1, :, 50:] = False
    documents = (torch.arange(keys) // 40).expand(2, -1)
    query, key = torch.zeros(2, 2 * group, queries, 16), torch.zeros(2, 2, keys, 16)
    given = mask.expand(-1, 2 * group, -1, -1)
    seen = interpreted("_seen", query, key, given, documents, keys - queries, causal, None, block_rows)
    bounds = interpreted("_bounds", 2, seen).view(2, 2 if several else 1, -1, 2)
    keep = visible(query, key, mask=mask, causal=causal, documents=documents)
    keep = keep.view(2, 2, group, queries, keys).transpose(2, 3).reshape(2, 2, group * queries, keys)
    for block in range(bounds.shape[2]):
        for row, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            # Of whole queries: a block may begin and end with some of a query's heads.
            first, last = block * block_rows // group, ((block + 1) * block_rows - 1) // group
            some = keep[row, head, first * group : (last + 1) * group]
            ends = some.any(0).nonzero().flatten().tolist()
            start, stop = bounds[row, head % bounds.shape[1], block].tolist()
            assert (start, stop) == (ends[0], ends[-1] + 1) if ends else start == stop


@needs_triton
def test_an_expanded_mask_is_not_copied(interpreted):
    """A mask over a million queries and keys, held as one line of a kilobyte."""
    query, key = torch.zeros(1, 1, 1, 16).expand(1, 4, 10**6, 16), torch.zeros(1, 1, 1, 16).expand(1, 2, 10**6, 16)
    line = torch.zeros(1, 1, 1, 10**6, dtype=torch.bool)
    line[..., 5:9] = True
    mask = line.expand(1, 4, 10**6, -1)
    got = interpreted("triton_statistics", query, key, scale=1.0, mask=mask, rows=slice(6, 7))
    assert torch.equal(got.visible_keys, torch.full((1, 4, 1), 2.0))


@needs_triton
def test_what_it_does_not_take(interpreted):
    query, key = qk(2, 2, 4, 4, 16)
    assert interpreted("supports", query, key)
    assert interpreted("supports", query.bfloat16(), key.bfloat16(), features=torch.zeros(2, 4, 64))
    for inputs, options, reason in [
        ((query.double(), key.double()), {}, "float64"),
        ((query.bfloat16(), key), {}, "the same for both"),
        ((query, key), {"features": torch.zeros(2, 4, 65)}, "up to 64 wide, not 65"),
        ((torch.zeros(1, 1, 1, 513), torch.zeros(1, 1, 1, 513)), {}, "up to 512 wide, not 513"),
    ]:
        assert not interpreted("supports", *inputs, **options)
        assert reason in interpreted("unsupported", *inputs, **options)
    with pytest.raises(Exception, match=r"float32, bfloat16 or float16.*call attention_statistics") as raised:
        interpreted("triton_statistics", query.double(), key.double(), scale=1.0)
    assert type(raised.value).__name__ == "ConfigError"


@pytest.mark.parametrize("hide", [False, True])
def test_triton_is_loaded_by_use_alone_and_need_not_be_there(hide):
    """On a CPU, where nothing is interpreted, the kernel declines."""
    script = f"""
import sys
import torch
import comppo.computation as computation
query = torch.zeros(1, 1, 3, 4)
computation.attention_statistics(query, query, scale=1.0)
assert "triton" not in sys.modules
if {hide}:
    sys.modules["triton"] = None
from comppo.computation import triton_launch
assert not triton_launch.supports(query, query)
print(triton_launch.unsupported(query, query))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    absent = hide or importlib.util.find_spec("triton") is None
    assert ("needs the package triton" if absent else "runs on CUDA, not on cpu") in done.stdout


COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from comppo.computation import triton_launch

class Absent:  # a driver whose GPU is not there: enough to compile for it
    capability = int(sys.argv[1])
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", self.capability, 32)

def compiled(kernel, grid):
    def launch(**options):
        binary = kernel.warmup(grid=grid, **options)
        found.append([kernel.__name__, binary.metadata.shared, binary.asm["ptx"].count("mma")])
    return launch

found = []
triton.runtime.driver.set_active(Absent())
triton.runtime.JITFunction.__getitem__ = compiled
triton_launch.unsupported = lambda *args, **options: None
half = {"dtype": torch.bfloat16}
query, key = torch.zeros(2, 8, 300, 128, **half), torch.zeros(2, 2, 300, 128, **half)
sinks, documents = torch.zeros(2, 300, dtype=torch.bool), torch.zeros(2, 300, dtype=torch.long)
mask, features = torch.zeros(2, 1, 300, 300, dtype=torch.bool), torch.zeros(2, 300, 64)
triton_launch.triton_statistics(query, key, scale=0.1, sinks=sinks, window=100)
triton_launch.triton_statistics(query, key, scale=0.1, sinks=sinks, mask=mask, causal=False)
triton_launch.triton_statistics(query.float(), key.float(), scale=0.1, mask=torch.zeros(2, 8, 300, 300), softcap=9.0)
triton_launch.triton_statistics(
    query, key, scale=0.1, documents=documents, features=features, s_aux=torch.zeros(8), distance=True
)
json.dump(found, sys.stdout)
"""


@needs_triton
@pytest.mark.parametrize(("capability", "shared"), [(80, 99 * 1024), (90, 227 * 1024)])
def test_it_compiles_for_gpus(capability, shared, tmp_path):
    """Through Triton's own launcher, without a GPU: types, layouts, shared memory, and tensor cores for bfloat16."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert [name for name, _, _ in found] == ["rows_kernel"] + 3 * ["bounds_kernel", "rows_kernel"]
    assert all(used <= shared for _, used, _ in found)
    assert [products > 0 for name, _, products in found if name == "rows_kernel"] == [True, True, False, True]
