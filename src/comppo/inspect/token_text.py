"""The text of single tokens, with bytes that are no whole character kept as bytes."""

import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per token.

    Args:
        tokenizer: of Transformers.
        ids: token ids.

    Returns:
        What each token decodes to by itself. Where that is only part of a character, its bytes come as lone surrogates
        (Python's "surrogateescape"), which `comppo.report.visible` shows as bytes; tokens that decode to nothing, such
        as some special ones, come by their names.
    """
    known: dict[int, str] = {}
    return [known[i] if i in known else known.setdefault(i, _text(tokenizer, i)) for i in map(int, ids)]


def _text(tokenizer: Any, token: int) -> str:
    decoded: str = tokenizer.decode([token])
    if decoded and "\N{REPLACEMENT CHARACTER}" not in decoded:
        # SentencePiece drops the space before a word that stands alone
        piece = tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and piece.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not decoded.startswith(" "):
            return " " + decoded
        return decoded
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return decoded
    found = _BYTE_TOKEN.fullmatch(piece)
    if found:
        return bytes([int(found.group(1), 16)]).decode("utf-8", "surrogateescape")
    if decoded and all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece).decode("utf-8", "surrogateescape")
    return decoded or piece


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE (GPT-2's and its heirs) writes each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
