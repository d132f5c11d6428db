import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import EvidenceError
from comppo.update.whiten import distributed_sum, masked_whiten


def drawn(seed, rows=4, tokens=7, keep=0.6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tokens, dtype=torch.float64, generator=generator) * 3 + 2
    return x, torch.rand(rows, tokens, generator=generator) < keep


@given(st.integers(0, 2**16), st.booleans())
def test_agrees_with_the_sample_moments(seed, shift_mean):
    x, mask = drawn(seed)
    got = masked_whiten(x, mask, shift_mean=shift_mean, epsilon=1e-6)
    kept = x[mask]
    if len(kept) < 2:
        return
    expected = (kept - kept.mean()) / (kept.var() + 1e-6).sqrt()
    torch.testing.assert_close(got[mask], expected if shift_mean else expected + kept.mean())
    assert (got[~mask] == 0).all()


def test_small_closed_form():
    """1, 2, 3 have mean 2 and unbiased variance 1."""
    x = torch.tensor([[1.0, 100.0, 2.0], [float("nan"), float("inf"), 3.0]])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    got = masked_whiten(x, mask, epsilon=0.0)
    assert got.tolist() == [[-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("value", [0.0, 0.1, -1e-3, 1e9, 3e-20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_constants_give_zero_even_without_epsilon(value, dtype):
    x = torch.full((3, 7), value, dtype=dtype)
    mask = torch.ones(3, 7, dtype=torch.bool)
    assert (masked_whiten(x, mask, epsilon=0.0) == 0).all()
    torch.testing.assert_close(masked_whiten(x, mask, epsilon=0.0, shift_mean=False), x)


def test_rounding_noise_is_not_blown_up_but_small_signals_are_scaled():
    mask = torch.ones(1, 4, dtype=torch.bool)
    noise = torch.tensor([[0.1, 0.1, torch.nextafter(torch.tensor(0.1), torch.tensor(1.0)), 0.1]])
    assert (masked_whiten(noise, mask, epsilon=0.0) == 0).all()
    signal = torch.tensor([[1.0, 1.0, 1.00001, 1.0]])
    assert masked_whiten(signal, mask, epsilon=0.0)[0, 2] == pytest.approx(1.5, rel=1e-6)


def test_few_or_no_tokens():
    x = torch.randn(2, 3)
    assert (masked_whiten(x, torch.zeros(2, 3, dtype=torch.bool)) == 0).all()
    one = torch.zeros(2, 3, dtype=torch.bool)
    one[1, 1] = True
    assert (masked_whiten(x, one) == 0).all()


def test_a_large_mean_costs_no_digits():
    """One-pass E[x^2] - E[x]^2 would lose everything here."""
    x = torch.tensor([[1e8 + 1, 1e8 + 2, 1e8 + 3]], dtype=torch.float64)
    got = masked_whiten(x, torch.ones(1, 3, dtype=torch.bool), epsilon=0.0)
    torch.testing.assert_close(got, torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64))


def test_nan_at_a_trainable_token_is_not_hidden():
    x = torch.tensor([[1.0, float("nan"), 2.0]])
    assert masked_whiten(x, torch.ones(1, 3, dtype=torch.bool)).isnan().all()


def sharded(x, mask, cut):
    """Whitens two shards in two threads whose reductions meet at a barrier."""
    barrier, slots, results = threading.Barrier(2, timeout=20), [None, None], [None, None]

    def work(rank, rows):
        def reduce(tensor):
            slots[rank] = tensor
            barrier.wait()
            total = slots[0] + slots[1]
            barrier.wait()
            return total

        results[rank] = masked_whiten(x[rows], mask[rows], all_reduce=reduce)

    threads = [threading.Thread(target=work, args=args) for args in ((0, slice(0, cut)), (1, slice(cut, None)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(results)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**16), st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.6, 1.0]))
def test_shards_equal_the_whole(seed, cut, keep):
    x, mask = drawn(seed, keep=keep)
    torch.testing.assert_close(sharded(x, mask, cut), masked_whiten(x, mask), rtol=1e-12, atol=1e-12)


def test_two_gloo_processes_equal_one(tmp_path):
    x, mask = drawn(3)
    torch.save((x, mask), tmp_path / "inputs.pt")
    worker = Path(__file__).with_name("whiten_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(r), tmp_path / "store", tmp_path / "inputs.pt", tmp_path / f"out{r}.pt"],
            env=os.environ | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")},
        )
        for r in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(tmp_path / f"out{r}.pt") for r in range(2)]
    torch.testing.assert_close(torch.cat([r[0] for r in results]), masked_whiten(x, mask), rtol=1e-12, atol=1e-12)
    assert [r[1].tolist() for r in results] == [[3.0], [3.0]]
    assert [r[2].tolist() for r in results] == [[1.0], [2.0]], "the input must stay as it was"


def test_without_a_process_group_the_sum_is_the_tensor():
    tensor = torch.tensor([1.0, 2.0])
    assert distributed_sum(tensor) is tensor


@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")
@pytest.mark.shapes
def test_shape_errors_name_the_argument():
    with pytest.raises(EvidenceError, match="x has shape"):
        masked_whiten(torch.ones(2, 3), torch.ones(2, 2, dtype=torch.bool))
