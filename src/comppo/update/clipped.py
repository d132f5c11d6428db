"""The clipped PPO objective, token by token: the reference for what the training engines do. Unchanged by comppo."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError


def clipped_objective(
    logps: Float[Tensor, "rows tokens"],
    old_logps: Float[Tensor, "rows tokens"],
    advantages: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    epsilon: float,
    epsilon_high: float | None = None,
) -> Float[Tensor, "rows tokens"]:
    """Loss of each token: `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)` with `r = exp(logps - old_logps)`.

    The gradient is that of the policy-gradient loss while the ratio is inside the clip range, and exactly 0 once it
    has left the range on the side that the advantage pushes to.

    Args:
        logps: log-probabilities under the policy that is trained, nats.
        old_logps: under the behaviour policy, nats; treated as constant.
        advantages: any unit; treated as constant.
        mask: true at trainable tokens; whatever stands elsewhere (NaN too) is ignored.
        epsilon: how far below 1 the ratio counts, unitless, in (0, 1].
        epsilon_high: how far above 1; None: `epsilon`.

    Returns:
        Loss per token (not yet averaged), unit of the advantages; 0 at masked slots.

    Raises:
        ConfigError: a clip range is not positive.
        EvidenceError: the shapes differ.

    Source:
        Schulman et al. 2017 (arXiv:1707.06347, eq. 7); separate upper range: DAPO (arXiv:2503.14476).
    """
    high = epsilon if epsilon_high is None else epsilon_high
    if not (0.0 < epsilon <= 1.0 and 0.0 < high < float("inf")):
        raise ConfigError(
            f"need 0 < epsilon <= 1 and epsilon_high > 0, got epsilon={epsilon!r}, epsilon_high={epsilon_high!r}. "
            "Usual: epsilon=0.2, epsilon_high=None."
        )
    for name, tensor in (("logps", logps), ("old_logps", old_logps), ("advantages", advantages)):
        if tensor.shape != mask.shape:
            raise EvidenceError(
                f"{name} has shape {tuple(tensor.shape)}, but mask has {tuple(mask.shape)}: pass equal shapes."
            )
    # Masked before exp: a NaN or infinite ratio would poison the gradient even if its loss is dropped afterwards.
    ratio = torch.where(mask, logps - old_logps.detach(), 0.0).exp()
    credit = torch.where(mask, advantages.detach(), 0.0)
    return -torch.minimum(ratio * credit, ratio.clamp(1.0 - epsilon, 1.0 + high) * credit)
