"""Text that cannot mislead: white space, control characters, bytes and lone accents drawn as marks.

A token may be a space, half of a character, a direction override or nothing. Each gets a mark that is styled unlike
text, so that a space and a literal "␣" differ. Standard library only.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_MARKS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\N{REPLACEMENT CHARACTER}": "�"}
_LAYOUT = frozenset(" \n\t")
# Control, format (direction overrides, zero-width joiners), surrogate, private, unassigned; separators but the space.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
FIRST_STRONG_ISOLATE, POP_ISOLATE = "\N{FIRST STRONG ISOLATE}", "\N{POP DIRECTIONAL ISOLATE}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text, or a mark that stands for something without a shape of its own."""

    text: str
    mark: bool


def _code(character: str) -> str:
    point = ord(character)
    if 0xDC80 <= point <= 0xDCFF:  # how Python carries a byte that is no UTF-8
        return f"⟨byte {point - 0xDC00:02X}⟩"
    return f"⟨U+{point:04X}⟩"


def _shown(character: str, first: bool, layout: bool) -> Iterator[Piece]:
    category = unicodedata.category(character)
    if layout and character in _LAYOUT:
        yield Piece(character, False)
    elif character in _MARKS:
        yield Piece(_MARKS[character], True)
    elif category in _HIDDEN:
        yield Piece(_code(character), True)
    else:
        if first and category in {"Mn", "Mc", "Me"}:  # an accent that would join whatever stands before it
            yield Piece("◌", True)
        yield Piece(character, False)


def pieces(text: str, *, layout: bool = False) -> list[Piece]:
    """Split `text` into stretches that can be shown and marks for what has no shape of its own.

    Args:
        text: anything, lone surrogates included.
        layout: keep spaces, tabs and line breaks as they are, for running text; otherwise they are marked as well.

    Returns:
        Pieces in the order of the text, at least one: empty text is a single mark.
    """
    if not text:
        return [Piece("∅", True)]
    if not layout and (byte := _BYTE_TOKEN.fullmatch(text)):
        return [Piece(f"⟨byte {byte.group(1).upper()}⟩", True)]
    found: list[Piece] = []
    for index, character in enumerate(text):
        for piece in _shown(character, index == 0, layout):
            if found and found[-1].mark == piece.mark and not piece.mark:
                found[-1] = Piece(found[-1].text + piece.text, False)
            else:
                found.append(piece)
    return found


def flat(text: str) -> str:
    """A token as one line of plain text, isolated from the direction of the text around it."""
    return FIRST_STRONG_ISOLATE + "".join(piece.text for piece in pieces(text)) + POP_ISOLATE


def harmless(text: str) -> str:
    """Running text with hidden characters spelled out; layout and isolates (which `flat` adds) are kept."""
    kept = _LAYOUT | {FIRST_STRONG_ISOLATE, POP_ISOLATE}
    return "".join(
        _code(character) if character not in kept and unicodedata.category(character) in _HIDDEN - {"Zs"} else character
        for character in text
    )
