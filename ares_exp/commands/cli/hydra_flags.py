"""Hydra's flags on Python 3.14, whose argparse rejects one of their help texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unchecked_help() -> Iterator[None]:
    """Makes argparse accept any object as a help text while a command of Hydra runs.

    Hydra up to 1.3.8 passes an object that only has a `repr` as the help of `--shell-completion`, and only argparse of
    Python 3.14 requires a string. Remove this when the lower bound of `hydra-core` has the fix.
    """
    if sys.version_info[:2] != (3, 14):
        yield
        return
    add_checked = argparse.ArgumentParser.add_argument

    def add_unchecked(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        text = options.pop("help", None)
        action = add_checked(parser, *names, **options)
        action.help = text
        return action

    argparse.ArgumentParser.add_argument = add_unchecked
    try:
        yield
    finally:
        del argparse.ArgumentParser.add_argument  # the class inherits it
