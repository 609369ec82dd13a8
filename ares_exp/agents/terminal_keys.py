"""Names of keys, as tmux has them, and what a keyboard sends for each."""

from __future__ import annotations

_PLAIN = {
    "Enter": "\r",
    "Tab": "\t",
    "BTab": "\x1b[Z",
    "Escape": "\x1b",
    "Space": " ",
    "BSpace": "\x7f",
    "IC": "\x1b[2~",
    "Insert": "\x1b[2~",
    "DC": "\x1b[3~",
    "Delete": "\x1b[3~",
    "PPage": "\x1b[5~",
    "PageUp": "\x1b[5~",
    "PgUp": "\x1b[5~",
    "NPage": "\x1b[6~",
    "PageDown": "\x1b[6~",
    "PgDn": "\x1b[6~",
    **{f"F{number}": f"\x1bO{letter}" for number, letter in zip(range(1, 5), "PQRS", strict=True)},
    **{f"F{n}": f"\x1b[{code}~" for n, code in zip(range(5, 13), (15, 17, 18, 19, 20, 21, 23, 24), strict=True)},
}
_CURSOR = {"Up": "A", "Down": "B", "Right": "C", "Left": "D", "Home": "H", "End": "F"}


def as_typed(keys: str, *, application_cursor: bool) -> str:
    """Returns what a keyboard sends: for the name of a key that key, else the text, with Enter for newlines.

    Args:
        keys: A text, or the name of one key: `Up`, `C-c`, `M-x`.
        application_cursor: Whether the program on the screen has asked for the other codes of the cursor keys.
    """
    if keys in _PLAIN:
        return _PLAIN[keys]
    if keys in _CURSOR:
        return f"\x1b{'O' if application_cursor else '['}{_CURSOR[keys]}"
    modifier, key = keys[:-1], keys[-1:]
    if modifier in ("C-", "^") and (key.isascii() and (key.isalpha() or key in "@[\\]^_")):
        return chr(ord(key.upper()) & 0x1F)
    if modifier == "M-" and key.isprintable():
        return f"\x1b{key}"
    return keys.replace("\r\n", "\r").replace("\n", "\r")
