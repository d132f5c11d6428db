"""What decides the answer to a chain prompt: for oracle values, masks of decisive tokens and audits."""

import re
from dataclasses import dataclass

from comppo.errors import TaskError
from comppo.tasks.chain import DIGITS, LINE_LENGTH, OPERATIONS, RESULTS

_PROMPT = re.compile(r"((?:[a-z][0-9] )+)((?:[a-z][a-z][+@][0-9] )+)\?([a-z])>")
VALUE_OFFSET, RESULT_OFFSET = 2, 6
"""Where a line of a response restates the looked-up value, and where its result stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One statement of a prompt."""

    name: str
    """The variable it defines."""
    parent: str
    """The variable it looks up."""
    operation: int
    """Index into `chain.OPERATIONS`."""
    operand: int
    """The digit y."""
    relevant: bool
    """Whether the asked variable depends on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedPrompt:
    """A chain prompt, taken apart."""

    starts: dict[str, int]
    """Start digits."""
    statements: tuple[Statement, ...]
    """In the order of the prompt, which is that of the response's lines."""
    asked: str
    """The variable that is asked about."""

    def answer(self) -> str:
        """The right answer."""
        values = dict(self.starts)
        for s in self.statements:
            values[s.name] = int(RESULTS[s.operation, values[s.parent], s.operand])
        return str(values[self.asked])

    def decisive_positions(self) -> list[int]:
        """Token indices, in a well-formed response, of the digits that decide the reward: the looked-up value and the
        result of each relevant line, and the answer."""
        lines = [LINE_LENGTH * line for line, statement in enumerate(self.statements) if statement.relevant]
        answer = LINE_LENGTH * len(self.statements) + 2
        return [at for line in lines for at in (line + VALUE_OFFSET, line + RESULT_OFFSET)] + [answer]


def parse_prompt(prompt: str) -> ParsedPrompt:
    """Take a chain prompt apart.

    Args:
        prompt: text of a prompt, as `chain.render_prompts` gives it.

    Returns:
        Start digits, statements in the order of the text, and the asked variable.

    Raises:
        TaskError: the text is no chain prompt, or speaks of a variable that it does not define.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise TaskError(f"not a prompt of the task 'chain': {prompt!r:.80}.")
    starts = {item[0]: int(item[1]) for item in match[1].split()}
    items, asked = match[2].split(), match[3]
    known = {*starts, *(item[0] for item in items)}
    if asked not in known or any(item[1] not in known for item in items):
        raise TaskError(f"the chain prompt {prompt!r:.80} speaks of a variable that it does not define.")
    relevant, wanted = set[str](), asked
    for item in reversed(items):
        if item[0] == wanted:
            relevant.add(item[0])
            wanted = item[1]
    statements = tuple(
        Statement(
            name=item[0],
            parent=item[1],
            operation=OPERATIONS.index(item[2]),
            operand=DIGITS.index(item[3]),
            relevant=item[0] in relevant,
        )
        for item in items
    )
    return ParsedPrompt(starts=starts, statements=statements, asked=asked)
