"""The noisy demonstrator whose responses pretrain the bundled model: imperfect on purpose, so that RL has head-room."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from comppo.tasks.chain import RESULTS, Problems, render_responses

COPY_ERROR = 0.01
"""Share of look-ups that are replaced with a random digit (which can be the right one)."""
HARD_SHARE, HARD_ACCURACY, EASY_ACCURACY, FIXED_ERROR_SHARE = 0.4, 0.30, 0.94, 0.8
TABLE_SEED = 7


@cache
def demonstrator_table() -> NDArray[np.float64]:
    """The demonstrator's result digit: probabilities (2 operations, 10 values x, 10 digits y, 10 results z).

    A fixed 40 % of the entries (in expectation) are right with probability .30, the others with .94. Of the errors,
    80 % go to one fixed wrong digit and the rest to the other eight alike. Read-only.
    """
    rng = np.random.default_rng(TABLE_SEED)
    wrong = (RESULTS + rng.integers(1, 10, RESULTS.shape)) % 10
    accuracy = np.where(rng.random(RESULTS.shape) < HARD_SHARE, HARD_ACCURACY, EASY_ACCURACY)
    error = 1 - accuracy
    table = np.repeat((error * (1 - FIXED_ERROR_SHARE) / 8)[..., None], 10, axis=-1)
    np.put_along_axis(table, RESULTS[..., None], accuracy[..., None], axis=-1)
    np.put_along_axis(table, wrong[..., None], (error * FIXED_ERROR_SHARE)[..., None], axis=-1)
    table.setflags(write=False)
    return table


def demonstrator_accuracy(length: int) -> float:
    """Probability that the demonstrator's answer is right on a chain of `length` operations, over random problems.

    Dynamic programming over the joint distribution of the right value and the demonstrator's own value; distractors
    play no part.
    """
    table = demonstrator_table()
    copied = (1 - COPY_ERROR) * np.eye(10) + COPY_ERROR / 10
    steps = np.einsum("vx,oxyz->ovyz", copied, table)
    joint = np.eye(10) / 10
    for _ in range(length):
        new = np.zeros((10, 10))
        for operation in range(2):
            for y in range(10):
                new[RESULTS[operation, :, y]] += joint @ steps[operation, :, y] / 20
        joint = new
    return float(np.trace(joint))


def demonstrate(problems: Problems, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """The demonstrator's responses, without end of text, and the answers they give."""
    return render_responses(problems, rng=rng, table=demonstrator_table(), copy_error=COPY_ERROR)
