"""Credit that can be checked: true advantages by Monte Carlo, and how far operators agree with them."""

from comppo.audit.continuations import ContinuationConfig, PrefixRewards, value_prefixes
from comppo.audit.fidelity import FidelityReport, OperatorFidelity, credit_fidelity
from comppo.audit.gradient import GradientCosine, gradient_cosines
from comppo.audit.proxy import ProxyReport, proxy_test
from comppo.audit.sampling import sample_continuations
from comppo.audit.truth import TrueAdvantages, true_advantages

__all__ = [
    "ContinuationConfig",
    "FidelityReport",
    "GradientCosine",
    "OperatorFidelity",
    "PrefixRewards",
    "ProxyReport",
    "TrueAdvantages",
    "credit_fidelity",
    "gradient_cosines",
    "proxy_test",
    "sample_continuations",
    "true_advantages",
    "value_prefixes",
]
