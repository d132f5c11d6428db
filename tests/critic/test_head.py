import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.critic.bounded import CriticInputs
from comppo.critic.features import feature_widths
from comppo.critic.head import CriticConfig, TransportAlignedCritic, check_parameter_share, parameter_share
from comppo.errors import ConfigError, EvidenceError

FEATURES = ("hidden", "surprisal", "position")
WIDTHS = feature_widths(FEATURES, hidden_width=24)


def critic(**settings):
    return TransportAlignedCritic(CriticConfig(features=FEATURES, **settings), WIDTHS).double()


def inputs(seed, rows=3, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    return CriticInputs(
        mask=torch.rand(rows, tokens, generator=generator) < 0.7,
        baseline=torch.rand(rows, dtype=torch.float64, generator=generator) * 3 - 1,
        features=torch.randn(rows, tokens, sum(WIDTHS.values()), generator=generator),
    )


def disturb(head, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += scale * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return head


def test_a_new_critic_is_exactly_the_baseline():
    batch = inputs(0)
    head = critic(reward_min=-1.0, reward_max=2.0)
    assert torch.equal(head(batch), torch.where(batch.mask, batch.baseline[:, None], 0.0))
    # Before a reward was observed, a baseline made of rewards is all that is known of the range
    assert torch.equal(critic()(batch), torch.where(batch.mask, batch.baseline[:, None], 0.0))


def test_without_a_group_the_baseline_is_the_running_mean_reward():
    head = critic()
    batch = CriticInputs(mask=torch.ones(2, 3, dtype=torch.bool), features=torch.zeros(2, 3, sum(WIDTHS.values())))
    assert (head(batch) == 0).all()
    head.observe_rewards(torch.tensor([1.0, 0.0, float("nan"), 0.5]))
    assert (head(batch) == 0.5).all()
    head.observe_rewards(torch.tensor([2.0]))
    assert head(batch)[0, 0].item() == pytest.approx(3.5 / 4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([0.1, 3.0, 100.0]), st.floats(-2, 1, width=32), st.floats(1, 3, width=32))
def test_predictions_stay_in_range_whatever_the_weights(seed, scale, low, high):
    head = disturb(critic(reward_min=low, reward_max=high), scale, seed)
    values = head(inputs(seed))
    assert (values >= min(low, 0.0)).all()
    assert (values <= high).all()


def test_the_output_is_the_documented_function():
    head = critic(reward_min=-1.0, reward_max=3.0)
    raw = torch.linspace(-4, 4, 9, dtype=torch.float64).expand(2, 9)
    baseline = torch.tensor([0.5, -0.25], dtype=torch.float64)
    batch = CriticInputs(mask=torch.ones(2, 9, dtype=torch.bool), baseline=baseline)
    b = baseline[:, None]
    # Both sides of the first row have at least a quarter of the range (1.0); the lower side of the second has .75
    up, down = 3.0 - b, torch.tensor([[1.5], [1.0]], dtype=torch.float64)
    expected = (b + up * raw.relu().tanh() - down * (-raw).relu().tanh()).clamp(-1.0, 3.0)
    torch.testing.assert_close(head.bounded(raw, batch), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("baseline", [0.0, 0.3, 1.0])
def test_a_new_critic_can_learn_even_where_the_baseline_is_at_the_edge(baseline):
    """relu has slope 0 at 0 on both sides: taken literally, the formula would never leave the baseline."""
    head = critic(reward_min=0.0, reward_max=1.0)
    given = inputs(1)
    batch = CriticInputs(mask=given.mask, baseline=torch.full_like(given.baseline, baseline), features=given.features)
    head(batch).sum().backward()
    assert head.value.bias.grad.item() == pytest.approx(0.5 * given.mask.sum().item())


def test_the_range_widens_with_rewards_and_always_holds_zero():
    head = critic()
    head.observe_rewards(torch.tensor([0.5, 2.0]))
    assert (head.reward_low.item(), head.reward_high.item()) == (0.0, 2.0)
    head.observe_rewards(torch.tensor([-1.0, 1.0, float("inf")]))
    assert (head.reward_low.item(), head.reward_high.item()) == (-1.0, 2.0)
    head.observe_rewards(torch.tensor([float("nan")]))
    assert head.rewards_seen.item() == 4
    fixed = critic(reward_min=0.2, reward_max=0.7)
    fixed.observe_rewards(torch.tensor([-5.0, 5.0]))
    assert (fixed.reward_low.item(), fixed.reward_high.item()) == (0.0, pytest.approx(0.7))


def test_masked_slots_are_zero_and_harmless():
    batch = inputs(2)
    head = disturb(critic(reward_min=-1.0, reward_max=1.0), 1.0)
    expected = head(batch)
    features = batch.features.clone()
    features[~batch.mask] = float("nan")
    poisoned = CriticInputs(mask=batch.mask, baseline=batch.baseline, features=features)
    head.observe_inputs(poisoned)
    assert head.feature_mean.isfinite().all()
    fresh = disturb(critic(reward_min=-1.0, reward_max=1.0), 1.0)
    values = fresh(poisoned)
    assert torch.equal(values, expected)
    assert (values[~batch.mask] == 0).all()
    values.sum().backward()
    assert all(p.grad.isfinite().all() for p in fresh.parameters())


def test_no_gradient_reaches_features_or_baseline():
    batch = inputs(3)
    batch.features.requires_grad_(True)
    batch.baseline.requires_grad_(True)
    disturb(critic(reward_min=-1.0, reward_max=1.0), 1.0)(batch).sum().backward()
    assert batch.features.grad is None
    assert batch.baseline.grad is None


def test_moments_of_the_first_batch_are_exact_and_later_ones_keep_a_tenth():
    head = critic()
    batch = inputs(4, rows=6)
    head.observe_inputs(batch)
    kept = batch.features[batch.mask].double()
    torch.testing.assert_close(head.feature_mean, kept.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.feature_variance, kept.var(0, correction=0), rtol=1e-5, atol=1e-6)
    second = inputs(5, rows=6)
    head.observe_inputs(second)
    both = torch.cat([kept, second.features[second.mask].double()])
    torch.testing.assert_close(head.feature_mean, both.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.feature_variance, both.var(0, correction=0), rtol=1e-5, atol=1e-6)
    head.features_seen.fill_(1e9)
    before = head.feature_mean.clone()
    head.observe_inputs(batch)
    torch.testing.assert_close(head.feature_mean, 0.9 * before + 0.1 * kept.mean(0), rtol=1e-5, atol=1e-6)


def test_state_dict_carries_everything():
    head = disturb(critic(), 1.0)
    head.observe_rewards(torch.tensor([-1.0, 4.0]))
    head.observe_inputs(inputs(6))
    other = critic(seed=5)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(inputs(7)), head(inputs(7)))
    assert other.reward_high.item() == 4.0
    assert other.mean_reward.item() == 1.5


def test_building_is_seeded_and_draws_no_global_random_number():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, second, third = critic(), critic(), critic(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.layer.weight, second.layer.weight)
    assert not torch.equal(first.layer.weight, third.layer.weight)


def test_wide_features_are_projected():
    head = critic(projection_size=4)
    assert set(head.projections) == {"hidden"}
    assert parameter_share(head, 1000) == (24 * 4 + (4 + 4 + 2 + 1) * 32 + 33) / 1000


def test_the_default_head_fits_models_of_every_size():
    def default(width, channels):
        config = CriticConfig()
        return TransportAlignedCritic(
            config, feature_widths(config.features, hidden_width=width, routing_channels=channels)
        )

    assert check_parameter_share(default(64, 12), 157_000) < 0.05  # 3 layers, 4 heads, width 64
    assert check_parameter_share(default(2560, 36 * 32), 4_000_000_000) < 0.01


def test_too_large_a_head_is_an_error_that_says_how_to_shrink():
    head = critic()
    with pytest.raises(
        ConfigError, match=r"7\.69% of the actor's 15,000 parameters.*projection_size=16.*hidden_size=32"
    ):
        check_parameter_share(head, 15_000)
    with pytest.raises(ConfigError, match=r"max_parameter_share=0\.00%"):
        check_parameter_share(head, 2_000_000_000, max_share=1e-9)
    check_parameter_share(critic(max_parameter_share=0.1), 15_000)
    with pytest.raises(ConfigError, match="actor_parameters=0"):
        parameter_share(head, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 0},
        {"projection_size": 0},
        {"epochs": 0},
        {"learning_rate": 0.0},
        {"gradient_clip": -1.0},
        {"weight_decay": -0.1},
        {"max_parameter_share": 0.0},
        {"reward_min": 1.0, "reward_max": 0.0},
        {"features": ("hiden",)},
    ],
)
def test_wrong_settings_name_themselves(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CriticConfig(**wrong)


def test_widths_and_columns_must_fit():
    with pytest.raises(ConfigError, match="widths names"):
        TransportAlignedCritic(CriticConfig(), WIDTHS)
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(EvidenceError, match="features is None"):
        critic()(CriticInputs(mask=mask))
    with pytest.raises(EvidenceError, match="built for 30 columns"):
        critic()(CriticInputs(mask=mask, features=torch.zeros(1, 2, 3)))


def test_rows_select_every_tensor():
    ids = torch.arange(12).view(3, 4)
    batch = CriticInputs(
        mask=torch.ones(3, 2, dtype=torch.bool),
        baseline=torch.arange(3.0),
        features=torch.arange(6.0).view(3, 2, 1),
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
    )
    part = batch.rows(slice(1, 3))
    assert part.mask.shape == (2, 2)
    assert part.baseline.tolist() == [1.0, 2.0]
    assert part.features[0, 0, 0] == 2.0
    assert part.input_ids.tolist() == ids[1:].tolist()
    assert part.attention_mask.shape == (2, 4)
    assert CriticInputs(mask=batch.mask).rows(slice(0, 1)).features is None


@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")
@pytest.mark.shapes
def test_shape_errors_name_the_argument():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(EvidenceError, match="features has shape"):
        CriticInputs(mask=mask, features=torch.zeros(2, 2, 1))
    with pytest.raises(EvidenceError, match="baseline has 3 rows"):
        CriticInputs(mask=mask, baseline=torch.zeros(3))
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(EvidenceError, match="attention_mask has shape"):
        CriticInputs(mask=mask, input_ids=ids, attention_mask=ids[:, :4])


@pytest.mark.parametrize(("edge", "wrong"), [(1.0, 0.3), (0.0, -0.3)])
def test_a_wrong_sign_at_the_edge_of_the_range_is_unlearned(edge, wrong):
    """The lone failure (baseline 1) and the lone success (baseline 0) of a group: u on the side without room."""
    head = critic(reward_min=0.0, reward_max=1.0)
    rows = CriticInputs(
        mask=torch.ones(1, 1, dtype=torch.bool), baseline=torch.tensor([edge]), features=torch.zeros(1, 1, 1)
    )
    raw = torch.full((1, 1), wrong, dtype=torch.float64, requires_grad=True)
    value = head.bounded(raw, rows)
    assert value.item() == edge, "the value stays in the range"
    (0.5 * (value - (1.0 - edge)) ** 2).sum().backward()
    assert raw.grad.item() * wrong > 0.05, "descent moves u back to the other side"
