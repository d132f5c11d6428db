"""Does an operator move the policy in the right direction? Cosines of policy gradients at the behaviour policy.

There the clipped surrogate has the gradient g = sum_t A_t grad log pi(y_t | s_t). One gradient is taken per operator
and prompt, so that the Gram matrices of these say everything about sums over any prompts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from comppo.audit.fidelity import Advantages
from comppo.audit.moments import ratio
from comppo.audit.resampling import bootstrap_weights, interval
from comppo.computation import evaluation_mode, score_plainly
from comppo.errors import EvidenceError

NUMBERS = 1 << 27
"""Entries of all gradients together, float32."""
LEAST_WIDTH, MOST_WIDTH = 1 << 14, 1 << 20
"""Of a gradient that has to be sketched."""
SPLITS = 100
"""Random splits of the prompts into two halves."""
TRUTH = ""
"""Stands where the name of an operator would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCosine:
    """Direction of one operator's policy gradient beside that of the true advantages; NaN where undefined."""

    cosine: float
    """On the same responses, corrected for the noise of the truth: it estimates the cosine with the exact gradient."""
    cosine_low: float
    """Of the 95 % interval, resampling prompts."""
    cosine_high: float
    cosine_measured: float
    """The same without the correction."""
    cosine_other: float
    """With the true gradient on other prompts: mean over random halves, truth's noise corrected."""
    cosine_other_low: float
    cosine_other_high: float


def gradient_cosines(
    model: Any,
    advantages: Mapping[str, Advantages],
    first_half: Float[Tensor, "rows tokens"],
    second_half: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    input_ids: Int[Tensor, "rows positions"],
    attention_mask: Shaped[Tensor, "rows positions"],
    prompts: Int[Tensor, " rows"],
    temperature: float = 1.0,
    bootstrap: int = 2000,
    seed: int = 0,
) -> dict[str, GradientCosine]:
    """Compare each operator's gradient with that of the true advantages.

    Where the truth is known for segments alone, give each token its whole segment's credit: a segment is one action.

    Args:
        model: the behaviour policy; gradients of its trainable parameters are taken, and none is left in `.grad`.
        advantages: credit by operator name; pairs as in `credit_fidelity`.
        first_half: true advantages from one half of the continuations.
        second_half: from the other.
        mask: true at the tokens that count.
        input_ids: prompt and response; the response is the last columns, as many as `mask` has.
        attention_mask: 1 or true where a token is real.
        prompts: which prompt each response answers.
        temperature: that of sampling.
        bootstrap: resamples of the prompts.
        seed: of resamples, splits and sketches.

    Returns:
        Cosines by operator name. Gradients with more parameters than fit are sketched by random signs, which leaves
        inner products right on average, with an error of about sqrt(2 / width) of the product of the norms.

    Raises:
        EvidenceError: fewer than two prompts, or no token counts.
    """
    prompts = torch.unique(prompts, return_inverse=True)[1]
    count = int(prompts.max()) + 1
    if count < 2 or not bool(mask.any()):
        raise EvidenceError(f"gradients need at least two prompts and a token that counts, got {count} prompts.")
    credits = {name: credit if isinstance(credit, tuple) else (credit, credit) for name, credit in advantages.items()}
    credits[TRUTH] = (first_half, second_half)
    parts: dict[tuple[str, int], Tensor] = {}
    for name, (a, b) in credits.items():
        parts[name, 0] = a
        if b is not a:
            parts[name, 1] = b
    gradients = _gradients(model, parts, mask, input_ids, attention_mask, prompts, temperature, seed)
    grams = _Grams(gradients, bootstrap, seed)
    return {name: grams.cosine(name) for name in advantages}


def _gradients(
    model: Any,
    parts: Mapping[tuple[str, int], Tensor],
    mask: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    prompts: Tensor,
    temperature: float,
    seed: int,
) -> dict[tuple[str, int], Float[Tensor, "prompts width"]]:
    """One gradient, sketched where needed, per credit and prompt."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    size, count = sum(p.numel() for p in parameters), int(prompts.max()) + 1
    width = max(LEAST_WIDTH, min(MOST_WIDTH, NUMBERS // (count * len(parts))))
    sketch = _Sketch(size, width, seed) if size > width else None
    found = {key: torch.zeros(count, width if sketch else size) for key in parts}
    with evaluation_mode(model), torch.enable_grad():
        for prompt in range(count):
            rows = prompts == prompt
            logps, _ = score_plainly(
                model, input_ids[rows], attention_mask[rows], mask.shape[1], temperature=temperature
            )
            for key, credit in parts.items():
                weights = torch.where(mask[rows], credit[rows].detach().to(logps), 0.0)
                loss = (weights * torch.where(mask[rows], logps, 0.0)).sum()
                grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                flat = torch.cat(
                    [
                        torch.zeros(p.numel()) if g is None else g.detach().float().flatten().cpu()
                        for p, g in zip(parameters, grads, strict=True)
                    ]
                )
                found[key][prompt] = flat if sketch is None else sketch(flat)
            del logps, loss, grads
    return found


class _Sketch:
    """Random signs, then the vector folded to `width` entries: inner products stay right on average."""

    def __init__(self, size: int, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.width, self.size = width, size
        blocks = math.ceil(size / width)
        self.signs = torch.randint(0, 2, (blocks, width), generator=generator, dtype=torch.int8) * 2 - 1

    def __call__(self, flat: Float[Tensor, " size"]) -> Float[Tensor, " width"]:
        total = torch.zeros(self.width)
        for block, signs in zip(torch.split(flat, self.width), self.signs, strict=True):
            total[: len(block)] += block * signs[: len(block)]
        return total


class _Grams:
    """Inner products between the prompts' gradients, float64."""

    def __init__(self, gradients: dict[tuple[str, int], Tensor], bootstrap: int, seed: int) -> None:
        self.gradients = {key: value.double() for key, value in gradients.items()}
        self.count = len(next(iter(gradients.values())))
        self.weights = bootstrap_weights(self.count, bootstrap, seed)
        self.halves = _splits(self.count, SPLITS, bootstrap, seed)
        self.signal = self._product((TRUTH, 0), (TRUTH, 1))
        truth = (self._of((TRUTH, 0)) + self._of((TRUTH, 1))) / 2
        whole = truth @ truth.T
        ones = torch.ones(self.count, dtype=torch.float64)
        self.reliability = float(ratio(ones @ self.signal @ ones, ones @ whole @ ones))

    def _product(self, a: tuple[str, int], b: tuple[str, int]) -> Tensor:
        return self._of(a) @ self._of(b).T

    def _of(self, key: tuple[str, int]) -> Tensor:
        """An operator that is no pair has one gradient for both halves."""
        return self.gradients[key] if key in self.gradients else self.gradients[key[0], 0]

    def cosine(self, name: str) -> GradientCosine:
        one, two = (name, 0), (name, 1)
        shared = (self._product(one, (TRUTH, 1)) + self._product(two, (TRUTH, 0))) / 2
        own = (self._product(one, one) + self._product(two, two)) / 2
        same = interval(self._curve(shared, own, self.weights, self.weights), self.count)
        left, right = self.halves
        curves = [self._curve(shared, own, u, v) for u, v in ((left, right), (right, left))]
        both = torch.stack(curves).mean(0)
        other = interval(torch.cat((both[:SPLITS].nanmean(0, keepdim=True), both[SPLITS:])), self.count)
        return GradientCosine(
            cosine=same.value,
            cosine_low=same.low,
            cosine_high=same.high,
            cosine_measured=same.value * math.sqrt(max(self.reliability, 0.0)),
            cosine_other=other.value,
            cosine_other_low=other.low,
            cosine_other_high=other.high,
        )

    def _curve(self, shared: Tensor, own: Tensor, mine: Tensor, theirs: Tensor) -> Tensor:
        """Cosine of the operator's gradient on the prompts `mine` with the truth's on `theirs`, for each draw."""
        above = torch.einsum("dp,pq,dq->d", mine, shared, theirs)
        norm = torch.einsum("dp,pq,dq->d", mine, own, mine)
        signal = torch.einsum("dp,pq,dq->d", theirs, self.signal, theirs)
        return ratio(above, (norm.clamp(min=0) * signal.clamp(min=0)).sqrt())


def _splits(count: int, splits: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights of two halves of the prompts: first random halves as they are, then resampled within each half."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.zeros(splits + draws, count, dtype=torch.float64)
    right = torch.zeros_like(left)
    for draw in range(splits + draws):
        order = torch.randperm(count, generator=generator)
        for side, members in ((left, order[: count // 2]), (right, order[count // 2 :])):
            if draw >= splits:
                members = members[torch.randint(len(members), members.shape, generator=generator)]
            side[draw].index_add_(0, members, torch.ones(len(members), dtype=torch.float64))
    return left, right
