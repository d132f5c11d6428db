"""Credit that can be checked: true advantages by Monte Carlo, and how far operators agree with them."""

from comppo.audit.continuations import ContinuationConfig, PrefixRewards, value_prefixes
from comppo.audit.sampling import sample_continuations
from comppo.audit.truth import TrueAdvantages, true_advantages

__all__ = [
    "ContinuationConfig",
    "PrefixRewards",
    "TrueAdvantages",
    "sample_continuations",
    "true_advantages",
    "value_prefixes",
]
