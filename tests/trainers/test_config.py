"""Settings that cannot work are refused when they are given, by name, with the remedy."""

import math

import pytest

from comppo import CompPOConfig
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
        ({"gate_statistic": "vibes"}, "gate_statistic='vibes'"),
        ({"gate_layers": "first"}, "gate_layers='first'"),
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


def test_the_fields_of_trl_keep_their_meaning(tmp_path):
    from dataclasses import fields

    from trl import GRPOConfig

    ours = CompPOConfig(output_dir=str(tmp_path), use_cpu=True)
    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    names = [f.name for f in fields(GRPOConfig) if f.name != "accelerator_config"]
    assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
