"""Gradient cosines against gradients that were worked out one by one, and against a chain's exact ones."""

import markov
import pytest
import torch

from comppo.audit.gradient import _Sketch, gradient_cosines
from comppo.errors import EvidenceError
from comppo.tasks.pretrain import ModelSize, make_model

ROWS, PROMPT, TOKENS = 8, 3, 5


@pytest.fixture(scope="module")
def model():
    return make_model(ModelSize(layers=1, hidden=16, heads=2, intermediate=16), 0)


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 40, (ROWS, PROMPT + TOKENS), generator=generator)
    attention = torch.ones_like(ids)
    attention[::2, 0] = 0  # a shorter prompt, padded on the left
    mask = torch.arange(TOKENS) < torch.tensor([5, 4, 3, 5, 2, 5, 1, 5])[:, None]
    attention[:, PROMPT:] = mask.long()
    return {"input_ids": ids, "attention_mask": attention, "prompts": torch.arange(ROWS) // 2}, mask


def gradient(model, batch, mask, credit):
    """By a plain loop over responses and tokens."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for row in range(ROWS):
        real = batch["attention_mask"][row].bool()
        logits = model(input_ids=batch["input_ids"][row][real][None]).logits[0].log_softmax(-1)
        ids = batch["input_ids"][row][real]
        start = int(real[:PROMPT].sum())
        loss = sum(credit[row, t] * logits[start + t - 1, ids[start + t]] for t in range(int(mask[row].sum())))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        total += torch.cat([g.flatten() for g in grads]).double()
    return total


def test_cosines_are_those_of_gradients_worked_out_one_by_one(model, batch):
    tensors, mask = batch
    generator = torch.Generator().manual_seed(1)
    credit, truth = torch.randn(2, ROWS, TOKENS, generator=generator)
    found = gradient_cosines(model, {"it": credit, "truth itself": truth}, truth, truth, mask, bootstrap=100, **tensors)
    a, b = gradient(model, tensors, mask, credit), gradient(model, tensors, mask, truth)
    assert found["it"].cosine == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=1e-5)
    assert found["truth itself"].cosine == pytest.approx(1.0, abs=1e-6)
    assert found["it"].cosine_measured == pytest.approx(found["it"].cosine, abs=1e-6)
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_other_prompts_are_those_of_the_other_half(model, batch):
    """Two prompts: the operator's gradient on one with the truth's on the other, averaged over both orders."""
    tensors, mask = batch
    tensors = {**tensors, "prompts": torch.arange(ROWS) // 4}
    generator = torch.Generator().manual_seed(2)
    credit, truth = torch.randn(2, ROWS, TOKENS, generator=generator)
    found = gradient_cosines(model, {"it": credit}, truth, truth, mask, bootstrap=100, **tensors)
    here = (torch.arange(ROWS) < 4)[:, None]
    parts = [
        torch.cosine_similarity(
            gradient(model, tensors, mask, torch.where(side, credit, 0.0)),
            gradient(model, tensors, mask, torch.where(~side, truth, 0.0)),
            dim=0,
        )
        for side in (here, ~here)
    ]
    assert found["it"].cosine_other == pytest.approx(float(sum(parts)) / 2, abs=1e-5)


def test_noise_of_the_truth_is_taken_out(model, batch):
    """Halves A + N and A - N: the mean is A, and the correction divides by |A|^2 - |N|^2 in place of |A|^2."""
    tensors, mask = batch
    generator = torch.Generator().manual_seed(3)
    truth, noise = torch.randn(2, ROWS, TOKENS, generator=generator)
    noise = 0.3 * noise
    found = gradient_cosines(model, {"it": truth}, truth + noise, truth - noise, mask, bootstrap=100, **tensors)["it"]
    a, n = gradient(model, tensors, mask, truth), gradient(model, tensors, mask, noise)
    assert found.cosine == pytest.approx(float((a @ a / (a @ a - n @ n)).sqrt()), abs=1e-5)
    assert found.cosine_measured == pytest.approx(1.0, abs=1e-6)


def test_on_the_chain_the_exact_advantages_give_the_exact_gradient():
    """log pi is linear in the output weights up to its normaliser: d log pi(j | i) / d W[k, i] = (1[k=j] - P[i, k])."""
    model = markov.make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    ids = torch.tensor([[2, 3, 4, 1], [5, 6, 7, 2], [2, 4, 4, 1], [6, 6, 3, 1]])
    credit = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    table, width = markov.transitions(), markov.VOCABULARY
    exact = torch.zeros(2, width, width, dtype=torch.float64)
    for row in range(4):
        for t in range(3):
            i, j = int(ids[row, t]), int(ids[row, t + 1])
            one_hot = torch.eye(width, dtype=torch.float64)[j]
            exact[row // 2, :, i] += credit[row, t].double() * (one_hot - table[i])
    other = credit + torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    mask, prompts = torch.ones(4, 3, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompts": prompts}
    found = gradient_cosines(model, {"it": credit}, credit, other, mask, bootstrap=100, **tensors)["it"]
    wrong = torch.zeros_like(exact)
    for row in range(4):
        for t in range(3):
            i, j = int(ids[row, t]), int(ids[row, t + 1])
            wrong[row // 2, :, i] += other[row, t].double() * (torch.eye(width, dtype=torch.float64)[j] - table[i])
    a, b = exact.sum(0).flatten(), wrong.sum(0).flatten()
    expected = (a @ (a + b) / 2) / (a @ a * (a @ b)).sqrt()
    assert found.cosine == pytest.approx(float(expected), abs=1e-4)


def test_sketches_keep_inner_products():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50_001, generator=generator)
    b = b + a
    sketch = _Sketch(50_001, 4096, 0)
    assert float(sketch(a) @ sketch(b)) == pytest.approx(
        float(a @ b), abs=4 * (2 / 4096) ** 0.5 * float(a.norm() * b.norm())
    )


def test_one_prompt_is_too_few(model, batch):
    tensors, mask = batch
    credit = torch.ones(ROWS, TOKENS)
    with pytest.raises(EvidenceError, match="at least two prompts"):
        gradient_cosines(
            model, {"it": credit}, credit, credit, mask, **{**tensors, "prompts": torch.zeros(ROWS).long()}
        )
