import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.critic.features import FEATURES, build_features, feature_widths
from comppo.errors import ConfigError, EvidenceError

ALL = tuple(FEATURES)
WIDTH, LAYERS, HEADS = 5, 2, 3


def sources(seed, rows=2, tokens=8):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "mask": torch.rand(rows, tokens, generator=generator) < 0.7,
        "logps": -draw(rows, tokens).exp(),
        "entropies": draw(rows, tokens).exp(),
        "hidden": draw(rows, tokens, WIDTH),
        "routing": draw(rows, tokens, LAYERS, HEADS),
        "statistic": draw(rows, tokens),
        "group_mean": draw(rows),
    }


def build(given_sources, names=ALL):
    return build_features(names, max_length=20, **given_sources)


def column(name, index=0):
    """First column of a feature in the concatenation of all."""
    widths = feature_widths(ALL, hidden_width=WIDTH, routing_channels=LAYERS * HEADS)
    return sum(width for other, width in widths.items() if ALL.index(other) < ALL.index(name)) + index


def test_order_widths_dtype_and_no_gradient():
    drawn = sources(0)
    drawn["hidden"].requires_grad_(True)
    drawn["logps"] = drawn["logps"].double().requires_grad_(True)
    widths = feature_widths(ALL, hidden_width=WIDTH, routing_channels=LAYERS * HEADS)
    assert tuple(widths) == ALL
    features = build(drawn)
    assert features.shape == (2, 8, sum(widths.values()))
    assert features.dtype == torch.float32
    assert not features.requires_grad
    for name in ALL:
        start = column(name)
        alone = build(drawn, (name,))
        torch.testing.assert_close(features[..., start : start + widths[name]], alone)


def test_surprisal_closed_form_skips_masked_tokens():
    """Surprisals 1, (tool), .2, 3: before each token only what was emitted counts."""
    mask = torch.tensor([[True, False, True, True, True]])
    logps = -torch.tensor([[1.0, 50.0, 0.2, 3.0, 9.0]])
    got = build_features(("surprisal",), mask=mask, logps=logps, max_length=5)[0]
    expected = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0],
            [1.0, 1.0, 1.0, math.log1p(1)],
            [0.2, 0.6, 1.0, math.log1p(1)],
            [3.0, 1.4, 3.0, math.log1p(2)],
        ]
    )
    torch.testing.assert_close(got, expected)


def test_entropy_and_position_closed_form():
    mask = torch.tensor([[False, True, False, True, True]])
    entropies = torch.tensor([[9.0, 1.0, 9.0, 2.0, 3.0]])
    got = build_features(("entropy", "position"), mask=mask, entropies=entropies, max_length=4)[0]
    expected = torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.25, math.log(2)], [3.0, 2.0, 0.5, math.log(3)]])
    torch.testing.assert_close(got[mask[0]], expected)
    assert (got[~mask[0]] == 0).all()


def test_hidden_is_normalised_and_group_mean_is_broadcast():
    drawn = sources(1)
    hidden = build(drawn, ("hidden",))
    expected = (drawn["hidden"] - drawn["hidden"].mean(-1, keepdim=True)) / drawn["hidden"].std(
        -1, keepdim=True, correction=0
    )
    torch.testing.assert_close(hidden[drawn["mask"]], expected[drawn["mask"]], rtol=1e-3, atol=1e-3)
    drawn["hidden"] = drawn["hidden"] * 100
    torch.testing.assert_close(build(drawn, ("hidden",)), hidden, rtol=1e-3, atol=1e-3)
    means = build(drawn, ("group_mean",))[..., 0]
    torch.testing.assert_close(means, torch.where(drawn["mask"], drawn["group_mean"][:, None], 0.0))
    drawn["group_mean"] = None
    assert (build(drawn, ("group_mean",)) == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.integers(0, 7))
def test_the_token_about_to_be_emitted_is_unknown(seed, t):
    drawn = sources(seed)
    before = build(drawn)
    drawn["logps"][:, t] -= 1.0
    after = build(drawn)
    assert (after[:, : t + 1] == before[:, : t + 1]).all()
    later = drawn["mask"][:, t] & drawn["mask"][:, t + 1 :].any(1)
    assert ((after != before).any(-1).any(-1) == later).all(), "an emitted token must show in every later state"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.integers(0, 7))
def test_nothing_later_is_seen(seed, t):
    drawn = sources(seed)
    before = build(drawn)
    for name in ("logps", "entropies", "hidden", "routing", "statistic"):
        drawn[name][:, t:] += 1.0
    drawn["mask"][:, t:] = True
    assert (build(drawn)[:, :t] == before[:, :t]).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.data(), st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_masked_slots_and_padding_change_nothing_elsewhere(seed, data, poison):
    """Slots of rubbish are inserted anywhere; the kept ones must not notice."""
    drawn = sources(seed)
    tokens = drawn["mask"].shape[1]
    expected = build(drawn)
    kept = sorted(data.draw(st.lists(st.integers(0, tokens + 4), min_size=tokens, max_size=tokens, unique=True)))
    padded = {"mask": torch.zeros(2, tokens + 5, dtype=torch.bool), "group_mean": drawn["group_mean"]}
    padded["mask"][:, kept] = drawn["mask"]
    for name in ("logps", "entropies", "hidden", "routing", "statistic"):
        padded[name] = torch.full((2, tokens + 5, *drawn[name].shape[2:]), poison)
        padded[name][:, kept] = drawn[name]
        padded[name][~padded["mask"]] = poison
    got = build(padded)
    torch.testing.assert_close(got[:, kept], expected, rtol=1e-6, atol=1e-6)
    assert (got[~padded["mask"]] == 0).all()


def test_impossible_tokens_stay_finite_and_no_tokens_are_fine():
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = build_features(("surprisal",), mask=mask, logps=torch.tensor([[-float("inf"), 1e-9, -1.0]]), max_length=3)
    assert got.isfinite().all()
    assert got[0, 1, 0] == 20.0
    empty = {name: tensor[:, :0] if tensor.ndim > 1 else tensor for name, tensor in sources(0).items()}
    assert build(empty).shape == (2, 0, column("group_mean") + 1)


@pytest.mark.parametrize("names", [("hiden", "position"), (), ("position", "position")])
def test_wrong_names_list_the_right_ones(names):
    with pytest.raises(ConfigError, match="hidden, routing, statistic, surprisal"):
        build(sources(0), names)
    with pytest.raises(ConfigError, match="hidden, routing, statistic, surprisal"):
        feature_widths(names)


@pytest.mark.parametrize(
    ("feature", "source"),
    [
        ("hidden", "hidden"),
        ("routing", "routing"),
        ("statistic", "statistic"),
        ("surprisal", "logps"),
        ("entropy", "entropies"),
    ],
)
def test_a_missing_source_is_named(feature, source):
    drawn = sources(0) | {source: None}
    with pytest.raises(ConfigError, match=f"feature '{feature}' needs {source}"):
        build(drawn)


def test_sizes_are_needed_and_max_length_is_checked():
    with pytest.raises(ConfigError, match="needs hidden_width"):
        feature_widths(("hidden",))
    with pytest.raises(ConfigError, match="needs routing_channels"):
        feature_widths(("routing",))
    with pytest.raises(ConfigError, match="max_length=0"):
        build_features(("position",), mask=torch.ones(1, 1, dtype=torch.bool), max_length=0)


@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")
@pytest.mark.shapes
@pytest.mark.parametrize("name", ["logps", "entropies", "hidden", "routing", "statistic", "group_mean"])
def test_shape_errors_name_the_argument(name):
    drawn = sources(0)
    drawn[name] = drawn[name][:1]
    with pytest.raises(EvidenceError, match=f"{name} has shape"):
        build(drawn)
