"""Hydra's choice between a run and a sweep (`hydra.mode`), without a composition where the command line decides it.

Hydra composes the whole config once to read its mode, and then again for what is to be done: two tenths of a second of
each command. Of our own options only experiments set a mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ares_exp.config.plugins import installed_plugins

_MAY_SET_IT = re.compile(r"[+~]*(experiment[@=]|hydra(\.mode|\.searchpath)?=)|--config-|-c[dpn]\b")


def is_decided_by_flags(arguments: Sequence[str]) -> bool:
    """Whether no file that a command reads can set the mode: no experiment, no options but our own."""
    return not installed_plugins().plugins and not any(_MAY_SET_IT.match(one) for one in arguments)


@contextmanager
def mode_from_flags(arguments: Sequence[str]) -> Iterator[None]:
    """Has Hydra take the mode from its flags for a while, where they alone decide it."""
    from hydra._internal.hydra import Hydra

    if not is_decided_by_flags(arguments):
        yield
        return
    composing = Hydra.get_mode
    Hydra.get_mode = _left_open  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = composing  # type: ignore[method-assign]


def _left_open(hydra: Any, config_name: str | None, overrides: list[str]) -> None:
    """Stands for the search of the mode: `None` is that of the flags."""
