"""Named ways to assign credit: what a run calls 'comppo' or 'grpo'. A literal table of `CompPOConfig` settings."""

from typing import Any

from comppo.errors import ConfigError

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"operator": "group_relative"},
    "comppo": {"operator": "comp_gae", "critic": "tac"},
    "gae_tac": {"operator": "gae", "critic": "tac"},
    "comp_gae_standard": {"operator": "comp_gae", "critic": "standard"},
    "gae_standard": {"operator": "gae", "critic": "standard"},
    "comppo_bootstrap": {"operator": "comp_gae", "critic": "tac", "gate_bootstrap": True},
    "comppo_lam_095": {"operator": "comp_gae", "critic": "tac", "lam": 0.95},
    "comppo_shuffled": {"operator": "comp_gae", "critic": "tac", "gate_control": "shuffled"},
    "comppo_inverted": {"operator": "comp_gae", "critic": "tac", "gate_control": "inverted"},
    "redistribute": {"operator": "redistribute", "redistribution": "improbability"},
    "prefix_tree": {
        "operator": "prefix_tree",
        "redistribution": "improbability",
        "negative_redistribution": "surprisal",
        "whiten_advantages": True,
    },
}
TITLES = {"grpo": "GRPO", "comppo": "CompPO", "prefix_tree": "Prefix tree + redistribution"}


def arm_settings(name: str) -> dict[str, Any]:
    """The `CompPOConfig` settings of an arm, as a new dictionary; ConfigError where there is no such arm."""
    if name not in ARMS:
        raise ConfigError(f"arm {name!r} is unknown: choose one of {', '.join(ARMS)}.")
    return dict(ARMS[name])
