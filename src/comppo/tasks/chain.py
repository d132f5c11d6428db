"""The bundled task: several interleaved chains of arithmetic modulo 10, one of which is asked about.

A prompt gives one start digit per chain, then statements in random order over the chains, then a question:

    a3 b7 ca+5 db@2 ?c>

`ca+5` defines c from the earlier variable a and the digit 5. A response restates every statement as
`name, parent, value of the parent, operation, digit, name, result, mark` and ends in the asked name, `#`, the answer
and end of text:

    ca3+5c8.db7@2d9!c#8

Both operations are one-to-one in the looked-up value, so one wrong digit on the asked chain never heals by itself,
while wrong digits on other chains cost nothing: few tokens decide the reward. The mark is chosen freely and decides
nothing. Every token is one character.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comppo.errors import ConfigError, TaskError
from comppo.evidence.verifiers import completion_text

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
OPERATIONS = "+@"
"""`+` is (x + y) % 10 and `@` is (3x + 7y + 4) % 10."""
MARKS = ".,;:!~"
PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *LETTERS, *DIGITS, *OPERATIONS, *MARKS, *" ?>#")
"""Token number i of the bundled tokenizer."""
TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}

LINE_LENGTH = 8
"""Tokens with which a response restates one statement."""
HELD_OUT_SHARE = 8
"""One prompt in this many is held out from all training, whatever the seed."""
TRAIN_STREAM, EVAL_STREAM, PRETRAIN_STREAM, MEASURE_STREAM = 0, 1, 2, 3
"""Second key of the random generators, beside the seed."""

_x, _y = np.arange(10)[:, None], np.arange(10)[None]
RESULTS: NDArray[np.int64] = np.stack([(_x + _y) % 10, (3 * _x + 7 * _y + 4) % 10])
"""The right result digit, indexed by operation, looked-up value and digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """Size of the task. A response has `8 * length * (distractors + 1) + 4` tokens, end of text included."""

    length: int = 3
    """Operations on the asked chain, at least 1."""
    distractors: int = 1
    """Other chains of the same length, at least 0."""
    prompts: int = 2048
    """Training prompts, all different, at least 1."""
    eval_prompts: int = 256
    """Held-out prompts, all different; 0 for none."""
    seed: int = 0
    """Decides every prompt; not negative."""

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("distractors", 0), ("prompts", 1), ("eval_prompts", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"chain: {name} must be a whole number of at least {least}, got {value!r}.")
        if (self.length + 1) * (self.distractors + 1) > len(LETTERS):
            raise ConfigError(
                f"chain: length={self.length} with distractors={self.distractors} needs "
                f"{(self.length + 1) * (self.distractors + 1)} variables, but there are {len(LETTERS)} letters: "
                "choose (length + 1) * (distractors + 1) <= 26."
            )

    @property
    def statements(self) -> int:
        """Statements in a prompt, and lines in a response."""
        return self.length * (self.distractors + 1)

    @property
    def completion_length(self) -> int:
        """Tokens of a well-formed response, end of text included."""
        return LINE_LENGTH * self.statements + 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problems:
    """A batch of problems of one size, as arrays."""

    starts: NDArray[np.int64]
    """(problems, chains): start digit of each chain."""
    chains: NDArray[np.int64]
    """(problems, statements): the chain that each statement continues."""
    operations: NDArray[np.int64]
    """(problems, statements): index into `OPERATIONS`."""
    operands: NDArray[np.int64]
    """(problems, statements): the digit y."""
    asked: NDArray[np.int64]
    """(problems,): the chain that is asked about."""

    def parents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The variable each statement looks up (problems, statements), and the last one of each chain."""
        count, chains = self.starts.shape
        rows = np.arange(count)
        last = np.tile(np.arange(chains), (count, 1))
        parents = np.zeros_like(self.chains)
        for line in range(self.chains.shape[1]):
            parents[:, line] = last[rows, self.chains[:, line]]
            last[rows, self.chains[:, line]] = chains + line
        return parents, last


def draw_problems(rng: np.random.Generator, count: int, *, length: int, distractors: int) -> Problems:
    """Draw `count` problems; those on the held-out side are among them (see `is_held_out`)."""
    chains = distractors + 1
    shape = (count, length * chains)
    return Problems(
        starts=rng.integers(0, 10, (count, chains)),
        chains=rng.permuted(np.tile(np.repeat(np.arange(chains), length), (count, 1)), axis=1),
        operations=rng.integers(0, 2, shape),
        operands=rng.integers(0, 10, shape),
        asked=rng.integers(0, chains, count),
    )


def render_prompts(problems: Problems) -> list[str]:
    """The prompt of each problem; all have the same length in characters, which are the tokens."""
    count, chains = problems.starts.shape
    statements = problems.chains.shape[1]
    letters, digits, operations = np.array(list(LETTERS)), np.array(list(DIGITS)), np.array(list(OPERATIONS))
    parents, last = problems.parents()
    text = np.full((count, 3 * chains + 5 * statements + 3), " ", dtype="U1")
    for chain in range(chains):
        text[:, 3 * chain] = letters[chain]
        text[:, 3 * chain + 1] = digits[problems.starts[:, chain]]
    for line in range(statements):
        at = 3 * chains + 5 * line
        text[:, at] = letters[chains + line]
        text[:, at + 1] = letters[parents[:, line]]
        text[:, at + 2] = operations[problems.operations[:, line]]
        text[:, at + 3] = digits[problems.operands[:, line]]
    text[:, -3] = "?"
    text[:, -2] = letters[last[np.arange(count), problems.asked]]
    text[:, -1] = ">"
    return ["".join(row) for row in text]


def render_responses(
    problems: Problems,
    *,
    rng: np.random.Generator | None = None,
    table: NDArray[np.float64] | None = None,
    copy_error: float = 0.0,
) -> tuple[list[str], list[str]]:
    """A response to each problem, without end of text, and the answer it gives.

    Args:
        problems: problems of one size.
        rng: draws marks and errors; None gives the right response with the first mark everywhere.
        table: probabilities of each result digit, (2 operations, 10 values x, 10 digits y, 10 results z); None: right.
        copy_error: share of look-ups that are replaced with a random digit, unitless, in [0, 1].

    Returns:
        Texts of `8 * statements + 3` characters, which are the tokens, and the digit that each gives as its answer:
        the right one unless an error was drawn on the asked chain.
    """
    count, chains = problems.starts.shape
    statements = problems.chains.shape[1]
    letters, digits = np.array(list(LETTERS)), np.array(list(DIGITS))
    operations, marks = np.array(list(OPERATIONS)), np.array(list(MARKS))
    parents, last = problems.parents()
    rows, values = np.arange(count), problems.starts.copy()
    cumulative = None if table is None else np.cumsum(table, axis=-1)
    text = np.full((count, LINE_LENGTH * statements + 3), MARKS[0], dtype="U1")
    for line in range(statements):
        chain, operation, y = problems.chains[:, line], problems.operations[:, line], problems.operands[:, line]
        x = values[rows, chain]
        if rng is not None:
            x = np.where(rng.random(count) < copy_error, rng.integers(0, 10, count), x)
        z = RESULTS[operation, x, y]
        if rng is not None:
            if cumulative is not None:
                z = np.minimum((rng.random((count, 1)) > cumulative[operation, x, y]).sum(1), 9)
            text[:, LINE_LENGTH * (line + 1) - 1] = marks[rng.integers(0, len(MARKS), count)]
        values[rows, chain] = z
        name = letters[chains + line]
        columns = (name, letters[parents[:, line]], digits[x], operations[operation], digits[y], name, digits[z])
        for offset, column in enumerate(columns):
            text[:, LINE_LENGTH * line + offset] = column
    answers = digits[values[rows, problems.asked]]
    text[:, -3] = letters[last[rows, problems.asked]]
    text[:, -2], text[:, -1] = "#", answers
    return ["".join(row) for row in text], answers.tolist()


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is on the held-out side. A checksum of its text decides, so no seed can move it."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def distinct_prompts(rng: np.random.Generator, count: int, *, config: ChainConfig, held_out: bool) -> dict[str, str]:
    """`count` different prompts of one side with their answers.

    Args:
        rng: draws the problems.
        count: prompts wanted, at least 0.
        config: gives `length` and `distractors`; its other fields are not used.
        held_out: which side of `is_held_out`.

    Returns:
        The right answer, one digit, by prompt, in the order in which they were drawn.

    Raises:
        TaskError: 20 batches of problems in a row held no new prompt of this side (small sizes have few).
    """
    found: dict[str, str] = {}
    barren = 0
    while len(found) < count:
        before = len(found)
        batch = draw_problems(rng, max(256, 2 * (count - before)), length=config.length, distractors=config.distractors)
        for prompt, answer in zip(render_prompts(batch), render_responses(batch)[1], strict=True):
            if len(found) < count and is_held_out(prompt) is held_out:
                found.setdefault(prompt, answer)
        barren = barren + 1 if len(found) == before else 0
        if barren == 20:
            side = "held-out" if held_out else "training"
            raise TaskError(
                f"chain: length={config.length} with distractors={config.distractors} has only about {len(found)} "
                f"different {side} prompts, but {count} were asked for: choose fewer, or a larger size."
            )
    return found


def training_problems(rng: np.random.Generator, count: int, *, length: int, distractors: int) -> Problems:
    """At most `count` random problems: `count` are drawn, and those on the held-out side are left out."""
    problems = draw_problems(rng, count, length=length, distractors=distractors)
    keep = np.array([not is_held_out(prompt) for prompt in render_prompts(problems)], dtype=bool)
    return Problems(**{name: getattr(problems, name)[keep] for name in Problems.__slots__})


def chain_prompts(config: ChainConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Training and held-out prompts with their answers, decided by `config` alone.

    Args:
        config: size of the task, numbers of prompts and seed.

    Returns:
        Right answers, one digit each, by prompt: `prompts` training ones, and `eval_prompts` held-out ones.

    Raises:
        TaskError: the size has too few different prompts.
    """
    train = distinct_prompts(
        np.random.default_rng([config.seed, TRAIN_STREAM]), config.prompts, config=config, held_out=False
    )
    held_out = distinct_prompts(
        np.random.default_rng([config.seed, EVAL_STREAM]), config.eval_prompts, config=config, held_out=True
    )
    return train, held_out


def _ended(text: str, ids: Sequence[int] | None) -> bool:
    """Whether the response ended by itself, as far as can be known.

    Ids of another tokenizer say nothing here: then the text alone decides. Padding, which the text never shows, is
    skipped wherever it stands: a policy can sample it in the middle too.
    """
    if ids is None:
        return True
    shown = [token for token in ids if token != TOKEN_IDS[PAD]]
    if shown[: len(text)] != [TOKEN_IDS.get(character) for character in text]:
        return True
    return shown[len(text) : len(text) + 1] == [TOKEN_IDS[EOS]]


def chain_reward(
    completions: Sequence[Any],
    answer: Sequence[str],
    completion_ids: Sequence[Sequence[int]] | None = None,
    **_: Any,
) -> list[float | None]:
    """1 where the text after the last `#` is exactly the answer and the response ended, else 0.

    Args:
        completions: texts without special tokens, or lists of messages.
        answer: right answers, one digit each.
        completion_ids: token ids with which TRL tells whether a response was cut off; None: taken as ended.

    Returns:
        One reward per completion, 0 or 1, reward units; never None.

    Raises:
        RewardError: a completion is neither a string nor a list of messages.
        ValueError: completions, answers and ids differ in number.
    """
    texts = [completion_text(completion) for completion in completions]
    ids: Sequence[Sequence[int] | None] = completion_ids if completion_ids is not None else [None] * len(texts)
    return [
        float("#" in text and text.rsplit("#", 1)[1] == right and _ended(text, tokens))
        for text, right, tokens in zip(texts, answer, ids, strict=True)
    ]
