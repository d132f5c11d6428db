"""Settings that cannot work are refused when they are given, by name, with the remedy."""

import math

import pytest

from comppo import CompPOConfig
from comppo.computation import DEFAULT_STATISTIC
from comppo.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operator": "gea"}, "operator='gea'.*comp_gae"),
        ({"gamma": 1.5}, r"gamma must lie in \[0, 1\]"),
        ({"lam": -0.1}, r"lam must lie in \[0, 1\]"),
        ({"lam": math.nan}, r"lam must lie in \[0, 1\]"),
        ({"critic_lam": 2.0}, "critic_lam"),
        ({"gate_minimum": 5.0, "gate_reference": 4.0}, "gate_minimum"),
        ({"critic_epochs": 0}, "critic_epochs"),
        ({"critic_learning_rate": -1.0}, "critic_learning_rate"),
        ({"reward_minimum": 2.0, "reward_maximum": 1.0}, "reward_minimum"),
        ({"baseline": "rlooo"}, "rlooo"),
        ({"scale_rewards": "nonsense"}, "nonsense"),
        ({"prefix_prior": -1.0}, "-1.0"),
        ({"gate_sink_tokens": -1}, "gate_sink_tokens"),
        ({"critic_lr_scheduler_type": "reduce_lr_on_plateau"}, "critic_lr_scheduler_type"),
        ({"gate_unit": "coefficients", "gate_minimum": 0.9, "gate_reference": 0.95, "gate_maximum": 1.2}, "1.2"),
        ({"gate_statistic": "vibes"}, "gate_statistic='vibes' is unknown.*router_entropy.*'module:attribute'"),
        ({"gate_statistic": "no_such_module_here:x"}, "gate_statistic='no_such_module_here:x': importing module"),
        ({"gate_statistic": "math:tau"}, "gate_statistic='math:tau' is a float"),
        ({"gate_statistic": len}, "gate_statistic=<built-in function len> cannot be recorded"),
        ({"gate_layers": "upper"}, "gate_layers='upper'"),
        ({"gate_control": "random"}, "gate_control='random'.*shuffled"),
        ({"critic": "huge"}, "critic='huge'"),
        ({"critic_features": ["smell"]}, "smell"),
        ({"redistribution": "luck"}, "redistribution='luck'"),
        ({"gate_trace": False}, "nothing to gate"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"length_adaptive_alpha": 0.0}, "length_adaptive_alpha"),
    ],
)
def test_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        CompPOConfig(output_dir=str(tmp_path), use_cpu=True, **changes).gate_layers_read()


@pytest.mark.parametrize(("given", "read"), [([1, 2], (1, 2)), (3, (3,)), ("0,2", (0, 2)), ("middle", "middle")])
def test_layers_are_given_as_people_write_them(given, read, tmp_path):
    assert CompPOConfig(output_dir=str(tmp_path), use_cpu=True, gate_layers=given).gate_layers_read() == read


HIDDEN = {"critic_features": ["hidden", "group_mean"]}
LEAN = {"critic_features": ["entropy", "group_mean"]}
NONE, ATTENTION, ROUTERS, BOTH = (False, False), (True, False), (False, True), (True, True)


@pytest.mark.parametrize(
    ("changes", "needs", "statistic", "hidden_layers"),
    [
        ({}, ATTENTION, DEFAULT_STATISTIC, (-1,)),
        (LEAN, ATTENTION, DEFAULT_STATISTIC, ()),
        (LEAN | {"gate_statistic": "distance"}, ATTENTION, "distance", ()),
        (LEAN | {"gate_statistic": "router_entropy"}, ROUTERS, "router_entropy", ()),
        ({"gate_statistic": "router_entropy"}, BOTH, "router_entropy", (-1,)),
        (LEAN | {"gate_statistic": "hidden_change"}, NONE, "hidden_change", (-1,)),
        (LEAN | {"gate_statistic": "output_entropy"}, NONE, "output_entropy", ()),
        (HIDDEN | {"gate_statistic": "output_entropy", "critic_hidden_layers": [0]}, NONE, "output_entropy", (0,)),
        # A function of the computation may look at everything
        (LEAN | {"gate_statistic": "math:sqrt"}, ATTENTION, math.sqrt, (-1,)),
        # Nothing looks at the statistic
        (LEAN | {"operator": "gae"}, NONE, "output_entropy", ()),
        (LEAN | {"operator": "gae", "gate_statistic": "router_entropy"}, NONE, "output_entropy", ()),
        ({"operator": "gae", "critic": "standard", "gate_statistic": "math:sqrt"}, NONE, "output_entropy", ()),
        ({"operator": "redistribute", "gate_statistic": "router_entropy"}, NONE, "output_entropy", ()),
        # Nothing but what the critic sees
        ({"operator": "gae", "gate_statistic": "maximum"}, ATTENTION, "maximum", (-1,)),
        ({"operator": "gae", "gate_statistic": "router_entropy"}, ATTENTION, "output_entropy", (-1,)),
        (
            {"operator": "gae", "gate_statistic": "router_entropy", "critic_features": ["statistic"]},
            ROUTERS,
            "router_entropy",
            (),
        ),
        ({"operator": "redistribute", "redistribution": "statistic"}, ATTENTION, DEFAULT_STATISTIC, ()),
        (
            {"operator": "prefix_tree", "negative_redistribution": "statistic", "gate_statistic": "router_top_k_mass"},
            ROUTERS,
            "router_top_k_mass",
            (),
        ),
    ],
)
def test_no_more_is_read_than_is_looked_at(changes, needs, statistic, hidden_layers, tmp_path):
    args = CompPOConfig(output_dir=str(tmp_path), use_cpu=True, gate_layers="1,2", **changes)
    assert (args.reads_attention(), args.reads_routers()) == needs
    assert args.reading() == {
        "statistic": statistic,
        "layers": (1, 2) if needs[0] else (),
        "router_layers": (1, 2),
        "sink_tokens": 1,
        "hidden_layers": hidden_layers,
    }


def test_concentrated_computation_keeps_more_unless_told_otherwise(tmp_path):
    def sharpness(**changes):
        return CompPOConfig(output_dir=str(tmp_path), use_cpu=True, **changes).gate_config().sharpness

    assert sharpness() == sharpness(gate_statistic="entropy") == sharpness(gate_statistic="router_entropy") == -1
    assert sharpness(gate_statistic="collision") == sharpness(gate_statistic="concentration") == 1
    assert sharpness(gate_statistic="entropy", gate_sharpness=2.0) == 2


def test_the_fields_of_trl_keep_their_meaning(tmp_path):
    from dataclasses import fields

    from trl import GRPOConfig

    ours = CompPOConfig(output_dir=str(tmp_path), use_cpu=True)
    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    names = [f.name for f in fields(GRPOConfig) if f.name != "accelerator_config"]
    assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
