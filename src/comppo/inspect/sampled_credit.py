"""Sampled responses under every operator that fits: with gates, without, with moved gates, and without a critic."""

import dataclasses

import torch
from torch import Tensor

from comppo.computation import Computation
from comppo.evidence.rewards import place_rewards
from comppo.inspect.operators import OperatorCredit, operator_credit
from comppo.trainers.pipeline import PipelineConfig, Processes, Rollout, compute_gates
from comppo.transport import GAE, CompGAE, GroupRelative, PrefixTree, Redistribute
from comppo.types import Evidence

CONTROLS = {
    "shuffled": ("Shuffled gates", "Control: each response's own gates in random order over its tokens."),
    "position_mean": ("Gates by position", "Control: every gate is the mean of the gates at its position."),
    "inverted": ("Inverted gates", "Control: the largest gate stands where the smallest was, and so on."),
}


def operators_of(
    rollout: Rollout, computation: Computation, values: Tensor, pipeline: PipelineConfig, *, scored: bool
) -> dict[str, OperatorCredit]:
    """Every operator on the same responses.

    Args:
        rollout: what was sampled and how it was rewarded.
        computation: what was read of the policy.
        values: (rows, tokens), reward units.
        pipeline: gate, gamma and lambda.
        scored: whether the rewards are rewards, and not a unit that is only to be carried.

    Returns:
        Credit by the operator's name, in the order of the page.
    """
    pipeline = dataclasses.replace(pipeline, operator="comp_gae", gate_control=None)
    processes = Processes()
    mask = rollout.mask & rollout.scorable[:, None]
    rollout = dataclasses.replace(rollout, mask=mask)

    def gates(control: str | None) -> Tensor:
        found = compute_gates(rollout, computation, dataclasses.replace(pipeline, gate_control=control), processes)
        assert found is not None, "comp_gae has gates"
        return found

    evidence = Evidence(
        rewards=place_rewards(rollout.response_rewards, mask),
        mask=mask,
        response_rewards=rollout.response_rewards,
        scorable=rollout.scorable,
        values=values,
        completion_ids=rollout.completion_ids,
        weights=(1.0 - computation.logps.exp()).clamp(min=0.0),
        num_generations=rollout.num_generations,
    )
    gated = CompGAE(
        gamma=pipeline.gamma,
        lam=pipeline.lam,
        length_alpha=pipeline.length_adaptive_alpha,
        gate_bootstrap=pipeline.gate_bootstrap,
        gate_trace=pipeline.gate_trace,
    )

    def with_gates(control: str | None, about: str) -> OperatorCredit:
        return operator_credit(gated, dataclasses.replace(evidence, gates=gates(control)), about=about)

    shown = {
        "Comp-GAE": with_gates(None, "Each token keeps of later credit the share that its gate says."),
        "Fixed GAE": with_gates("constant", "One coefficient for every token: the mean of the gates."),
        "GAE": operator_credit(
            GAE(gamma=pipeline.gamma, lam=pipeline.lam, length_alpha=pipeline.length_adaptive_alpha),
            evidence,
            about=f"No gate: gamma {pipeline.gamma:g} and lambda "
            f"{'by length' if pipeline.length_adaptive_alpha is not None else format(pipeline.lam, 'g')}.",
        ),
    }
    if scored and rollout.num_generations > 1:
        grpo = "The response's reward against the mean of its group, in standard deviations: the same for each token."
        shown = {
            "Comp-GAE": shown.pop("Comp-GAE"),
            "GRPO": operator_credit(GroupRelative(), evidence, about=grpo),
            **shown,
        }
        shown["Redistribution"] = operator_credit(
            Redistribute(), evidence, about="GRPO's number, spread over the tokens in proportion to 1 - p, sum kept."
        )
        shown["Prefix tree"] = operator_credit(
            PrefixTree(prior=pipeline.prefix_prior),
            evidence,
            about="V of a prefix is the mean reward of the group's other responses that share it.",
        )
    shown |= {label: with_gates(control, about) for control, (label, about) in CONTROLS.items()}
    if scored:
        sharpening = torch.where(mask, computation.entropies + computation.logps, 0.0)
        about = "Control that ignores the reward: entropy minus surprisal. What it gains is confidence, not credit."
        shown["Sharpening"] = OperatorCredit(advantages=sharpening, about=about)
    return shown
