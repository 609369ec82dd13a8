"""An emulation of a terminal's screen (with `pyte`), and the characters that the keys of a keyboard send."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from ares_exp.errors import PreflightError

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
    """Returns the characters that a terminal receives for the name of a key (`Up`, `C-c`, `M-x`) or for a text.

    Each newline in a text becomes a carriage return, the character of the Enter key. With `application_cursor`, the
    cursor keys have the codes that they send after a program has switched the terminal to application mode.
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


HISTORY_LINES = 20_000
_CURSOR_KEYS = 1 << 5
"""Terminal mode 1 (application mode of the cursor keys). `pyte` shifts the numbers of private modes by 5 bits."""
_ALTERNATE = (47, 1047, 1049)
"""Private modes that full-screen programs use to switch to an alternate screen."""


class TerminalScreen:
    """The screen of a terminal, and the last lines that have scrolled off its top."""

    def __init__(self, columns: int, lines: int) -> None:
        """Creates an empty screen. Raises `PreflightError` if `pyte` is not installed."""
        pyte = emulator()
        self._screen = _screen_class()(columns, lines, history=HISTORY_LINES, ratio=0.5)
        self._stream = pyte.Stream(self._screen)
        self._told: str | None = None

    def feed(self, text: str) -> None:
        """Processes the output of a terminal, with its control sequences."""
        self._stream.feed(text)

    @property
    def application_cursor(self) -> bool:
        """Whether a program has switched the cursor keys to application mode; see `as_typed`."""
        return _CURSOR_KEYS in self._screen.mode

    @property
    def visible(self) -> str:
        """Current content of the screen."""
        return _text(line.rstrip() for line in self._screen.display)

    @property
    def everything(self) -> str:
        """Content of the screen, preceded by the lines that have scrolled off (at most about `HISTORY_LINES`)."""
        columns, above = range(self._screen.columns), self._screen.history.top
        lines = ["".join(line[column].data for column in columns) for line in above]
        return _text(line.rstrip() for line in [*lines, *self._screen.display])

    def news(self) -> str:
        """Returns the output since the previous call, preceded by the last line of the earlier output as context.

        At the first call, after a change of the earlier content, or without new output, returns the visible screen.
        """
        now, before, self._told = self.everything, self._told, self.everything
        if before is not None and before.strip() in now:
            before = before.strip()
            new = now[before.rfind("\n") if "\n" in before else now.index(before) :]
            if new.strip():
                return f"New Terminal Output:\n{new}"
        return f"Current Terminal Screen:\n{self.visible}"


def _text(lines: Any) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


@cache
def emulator() -> Any:
    """Imports and returns `pyte`, which emulates the terminal. Raises `PreflightError` if it is not installed."""
    try:
        import pyte
    except ImportError:
        raise PreflightError(
            "agent=terminal emulates the terminal's screen with pyte: pip install 'ares-exp[terminal]'."
        ) from None
    return pyte


@cache
def _screen_class() -> Any:
    """Returns a subclass of pyte's `HistoryScreen` that shows the earlier content after a program such as vim ends."""
    base: Any = emulator().HistoryScreen

    class Screen(base):  # type: ignore[misc]
        main: Any = None

        def set_mode(self, *modes: int, **more: Any) -> None:
            super().set_mode(*modes, **more)
            if more.get("private") and self.main is None and set(modes) & set(_ALTERNATE):
                self.main = copy.deepcopy(self.buffer), copy.copy(self.cursor), self.history
                super().erase_in_display(2)
                super().cursor_position()

        def reset_mode(self, *modes: int, **more: Any) -> None:
            super().reset_mode(*modes, **more)
            if more.get("private") and self.main is not None and set(modes) & set(_ALTERNATE):
                self.buffer, self.cursor, self.history = self.main
                self.main = None
                self.dirty.update(range(self.lines))

    return Screen
