"""Value functions: a small head on the actor's computation, and a full Transformer to compare it with."""

from comppo.critic.bounded import Critic, CriticInputs
from comppo.critic.features import FEATURES, build_features, feature_widths
from comppo.critic.fit import FitReport, critic_optimizer, explained_variance, fit_critic
from comppo.critic.head import CriticConfig, TransportAlignedCritic, check_parameter_share, parameter_share
from comppo.critic.standard import StandardCritic

__all__ = [
    "FEATURES",
    "Critic",
    "CriticConfig",
    "CriticInputs",
    "FitReport",
    "StandardCritic",
    "TransportAlignedCritic",
    "build_features",
    "check_parameter_share",
    "critic_optimizer",
    "explained_variance",
    "feature_widths",
    "fit_critic",
    "parameter_share",
]
