"""What a person may look at after a generation: its responses with their credit, as plain Python values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comppo.computation import Computation
from comppo.trainers.pipeline import Assignment, Rollout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CreditSnapshot:
    """One generation's responses and credit, on the CPU and without the hidden states that made it."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    mask: Tensor
    """True at trained tokens."""
    response_rewards: Tensor
    scorable: Tensor
    advantages: Tensor
    gates: Tensor | None
    values: Tensor | None
    statistic: Tensor | None
    logps: Tensor | None

    @classmethod
    def take(
        cls, batch: dict[str, Any], rollout: Rollout, assignment: Assignment, computation: Computation | None
    ) -> "CreditSnapshot":
        """Copy to the CPU what the records need.

        Args:
            batch: TRL's generation batch.
            rollout: what was sampled and rewarded.
            assignment: the credit.
            computation: what was read, or None.

        Returns:
            The snapshot; nothing of it lives on the device.
        """

        def kept(tensor: Tensor) -> Tensor:
            return tensor.detach().cpu()

        return cls(
            **{name: kept(batch[name]) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
            mask=kept(rollout.mask & rollout.scorable[:, None]),
            response_rewards=kept(rollout.response_rewards),
            scorable=kept(rollout.scorable),
            advantages=kept(assignment.advantages),
            gates=kept(assignment.gates) if assignment.gates is not None else None,
            values=kept(assignment.values) if assignment.values is not None else None,
            statistic=kept(computation.statistic) if computation is not None else None,
            logps=kept(computation.logps) if computation is not None else None,
        )

    def records(self, tokenizer: Any, limit: int) -> list[dict[str, Any]]:
        """Responses token by token.

        Args:
            tokenizer: gives the text of tokens.
            limit: greatest number of responses; the best and the worst rewarded come first, in turns.

        Returns:
            One dictionary per response: prompt, completion, reward (None where unscorable), and per token its text
            (tokens), advantages, gates, values, statistic, logps and whether it was trained.
        """
        order = self.response_rewards.argsort(descending=True, stable=True).tolist()
        # From both ends inwards, so that a few responses show success and failure
        picked = [order[i // 2] if i % 2 == 0 else order[-(i // 2) - 1] for i in range(min(limit, len(order)))]
        return [self._record(row, tokenizer) for row in picked]

    def _record(self, row: int, tokenizer: Any) -> dict[str, Any]:
        real = self.completion_mask[row].bool()
        ids = self.completion_ids[row][real].tolist()
        record: dict[str, Any] = {
            "prompt": tokenizer.decode(self.prompt_ids[row][self.prompt_mask[row].bool()].tolist()),
            "completion": tokenizer.decode(ids),
            "reward": self.response_rewards[row].item() if self.scorable[row] else None,
            "tokens": [tokenizer.decode([token]) for token in ids],
            "trained": self.mask[row][real].tolist(),
        }
        for name in ("advantages", "gates", "values", "statistic", "logps"):
            tensor = getattr(self, name)
            record[name] = tensor[row][real].tolist() if tensor is not None else None
        return record

    def gate_histogram(self, bins: int) -> dict[str, Any] | None:
        """How the gates are distributed.

        Args:
            bins: number of bars.

        Returns:
            edges, counts, and the minimum, maximum and mean observed; None without gates.
        """
        if self.gates is None:
            return None
        gates = self.gates[self.mask].double()
        if gates.numel() == 0:
            return None
        low, high = gates.min().item(), gates.max().item()
        counts, edges = torch.histogram(gates, bins=bins, range=(low, max(high, low + 1e-6)))
        return {
            "edges": edges.tolist(),
            "counts": [int(count) for count in counts.tolist()],
            "minimum": low,
            "maximum": high,
            "mean": gates.mean().item(),
        }
