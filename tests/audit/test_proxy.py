"""The proxy test: what it finds, what it removes, and how seldom it is fooled."""

import pytest
import torch

from comppo.audit.proxy import proxy_test
from comppo.errors import ConfigError, EvidenceError

ROWS, TOKENS, CHANNELS = 24, 16, 8


def draw(seed):
    """Importance along each response is autocorrelated; so are the channels, of which none knows of it."""
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.randn(ROWS, TOKENS + 2, 1 + CHANNELS, generator=generator, dtype=torch.float64)
    smooth = smooth[:, :-2] + smooth[:, 1:-1] + smooth[:, 2:]
    ids = torch.randint(0, 5, (ROWS, TOKENS + 1), generator=generator)
    surprisal = torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    mask = torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (ROWS, 1), generator=generator)
    return smooth[..., 0].exp(), smooth[..., 1:], ids, surprisal, mask


def run(importance, channels, ids, surprisal, mask, **options):
    return proxy_test(
        channels, importance, mask, token_ids=ids[:, 1:], input_tokens=ids[:, :-1], surprisal=surprisal, **options
    )


def test_a_channel_that_follows_importance_is_found_and_the_others_are_not():
    importance, channels, *rest = draw(0)
    channels[..., 3] = importance + 0.5 * channels[..., 3]
    report = run(importance, channels, *rest)
    assert report.p_value[3] <= 0.002 and report.partial[3] > 0.8
    assert report.p_value[[0, 1, 2, 4, 5, 6, 7]].min() > 0.05


def test_plain_correlations_are_those_of_numpys_formula():
    importance, channels, ids, surprisal, mask = draw(1)
    report = run(-importance, channels, ids, surprisal, mask)  # |.| is taken
    expected = torch.corrcoef(torch.stack((importance[mask], channels[..., 2][mask])))[0, 1]
    torch.testing.assert_close(report.correlation[2], expected)
    assert report.units == int(mask.sum())


def test_position_token_identity_and_surprisal_are_removed():
    importance, channels, ids, surprisal, mask = draw(2)
    position = torch.arange(TOKENS, dtype=torch.float64).expand(ROWS, -1)
    identity = torch.tensor([3.0, -1.0, 0.5, 2.0, 7.0], dtype=torch.float64)
    channels[..., 0] = 2 * position - 0.1 * position.square() + (1 + position).log()
    channels[..., 1] = identity[ids[:, 1:]]
    channels[..., 2] = identity[ids[:, :-1]]
    channels[..., 3] = 4 * surprisal
    report = run(importance + 3 * (position + identity[ids[:, 1:]] + 9 * surprisal), channels, ids, surprisal, mask)
    assert report.correlation[[0, 1, 3]].abs().min() > 0.1
    assert report.partial[:4].isnan().all() and report.p_value[:4].isnan().all()


def test_the_family_is_fooled_no_more_often_than_five_times_in_a_hundred():
    """200 data sets without any relation; the share with a p-value below .05 has a standard error of .015."""
    fooled = sum(bool((run(*draw(100 + seed), permutations=99).p_value <= 0.05).any()) for seed in range(200))
    assert fooled / 200 <= 0.05 + 2 * 0.0154


def test_responses_that_say_nearly_the_same_count_as_one_prompt():
    """Six prompts with four copies each: as 24 responses they fool the test often, as groups they do not."""

    def fooled(prompts):
        found = 0
        for seed in range(100):
            copies = [part[:6].repeat_interleave(4, 0) for part in draw(500 + seed)]
            found += bool((run(*copies, permutations=99, prompts=prompts).p_value <= 0.05).any())
        return found / 100

    assert fooled(None) > 0.2
    assert fooled(torch.arange(24) // 4) <= 0.05 + 2 * 0.022


def test_segments_are_units_with_the_means_of_their_tokens():
    importance, channels, ids, surprisal, mask = draw(3)
    segments = torch.where(mask, torch.arange(TOKENS) // 4, -1)
    report = run(importance, channels, ids, surprisal, mask, segments=segments)
    means = [
        (importance[r, mask[r]][s : s + 4].mean(), channels[r, mask[r], 0][s : s + 4].mean())
        for r in range(ROWS)
        for s in range(0, int(mask[r].sum()), 4)
    ]
    assert report.units == len(means)
    torch.testing.assert_close(report.correlation[0], torch.corrcoef(torch.tensor(means).T.double())[0, 1])


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="permutations must be at least 99"):
        run(*draw(0), permutations=10)
    importance, channels, ids, surprisal, mask = draw(0)
    with pytest.raises(EvidenceError, match="fewer than three tokens"):
        run(importance, channels, ids, surprisal, mask & False)
