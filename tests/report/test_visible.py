import pytest
from hypothesis import given
from hypothesis import strategies as st

from comppo.report.visible import flat, harmless, pieces


def joined(text, **options):
    return [(piece.text, piece.mark) for piece in pieces(text, **options)]


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("", [("∅", True)]),
        (" the", [("␣", True), ("the", False)]),
        ("␣the", [("␣the", False)]),  # the sign itself is text, not a mark
        ("\n\n", [("⏎", True), ("⏎", True)]),
        ("\t\r", [("⇥", True), ("␍", True)]),
        ("<0xe2>", [("⟨byte E2⟩", True)]),
        ("\udce2", [("⟨byte E2⟩", True)]),
        ("\ud83d", [("⟨U+D83D⟩", True)]),
        ("\ufffd", [("�", True)]),
        ("a\u202eb", [("a", False), ("⟨U+202E⟩", True), ("b", False)]),
        ("\u00a0", [("⟨U+00A0⟩", True)]),
        ("\u200b", [("⟨U+200B⟩", True)]),
        ("\x00", [("⟨U+0000⟩", True)]),
        ("\u0301", [("◌", True), ("\u0301", False)]),
        ("e\u0301", [("e\u0301", False)]),
        ("שלום", [("שלום", False)]),
        ("😀", [("😀", False)]),
    ],
)
def test_every_token_has_a_shape(token, shown):
    assert joined(token) == shown


def test_running_text_keeps_its_layout():
    assert joined("a b\n\tc\u202e", layout=True) == [("a b\n\tc", False), ("⟨U+202E⟩", True)]


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_invisible_is_left(text):
    """Lone surrogates included; what is left can be encoded and shows every character that has a shape."""
    shown = "".join(piece.text for piece in pieces(text))
    shown.encode()
    assert not set(shown) & {"\u202e", "\u200b", "\x00", "\n", " "}
    assert shown
    harmless(text).encode()


def test_flat_tokens_are_isolated():
    assert flat("א ב") == "\u2068א␣ב\u2069"
    assert flat("\u2069") == "\u2068⟨U+2069⟩\u2069"  # a token cannot end its own isolation
