"""Transport: how evidence becomes one advantage per token. Causal, linear in what is carried, detached."""

from comppo.transport.broadcast import GroupRelative, group_relative, group_residuals
from comppo.transport.comp_gae import CompGAE, comp_gae, length_adaptive_lam
from comppo.transport.controls import CONTROLS, GateControl, constant, inverted, position_mean, shuffled
from comppo.transport.gae import GAE, gae
from comppo.transport.gate import GateConfig, gate_from_statistic, standardize
from comppo.transport.kernel import transport_kernel
from comppo.transport.prefix_tree import PrefixTree, prefix_values
from comppo.transport.recurrence import carry_back
from comppo.transport.redistribute import Redistribute, redistribute
from comppo.transport.registry import OPERATORS, build_operator

__all__ = [
    "CONTROLS",
    "GAE",
    "OPERATORS",
    "CompGAE",
    "GateConfig",
    "GateControl",
    "GroupRelative",
    "PrefixTree",
    "Redistribute",
    "build_operator",
    "carry_back",
    "comp_gae",
    "constant",
    "gae",
    "gate_from_statistic",
    "group_relative",
    "group_residuals",
    "inverted",
    "length_adaptive_lam",
    "position_mean",
    "prefix_values",
    "redistribute",
    "shuffled",
    "standardize",
    "transport_kernel",
]
