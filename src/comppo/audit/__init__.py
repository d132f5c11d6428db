"""Credit that can be checked: true advantages by Monte Carlo, and how far operators agree with them."""

from comppo.audit.continuations import ContinuationConfig, PrefixRewards, value_prefixes
from comppo.audit.fidelity import FidelityReport, OperatorFidelity, credit_fidelity
from comppo.audit.sampling import sample_continuations
from comppo.audit.truth import TrueAdvantages, true_advantages

__all__ = [
    "ContinuationConfig",
    "FidelityReport",
    "OperatorFidelity",
    "PrefixRewards",
    "TrueAdvantages",
    "credit_fidelity",
    "sample_continuations",
    "true_advantages",
    "value_prefixes",
]
