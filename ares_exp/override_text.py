"""Strings in Hydra's grammar of overrides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def quoted(text: str) -> str:
    """A string in which nothing is interpolated."""
    from hydra.core.override_parser.types import Quote, QuotedString

    string: Any = QuotedString(text=text.replace("${", "\\${"), quote=Quote.double).with_quotes()
    return str(string)


def listed(texts: Iterable[str]) -> str:
    """A list of such strings."""
    return f"[{','.join(map(quoted, texts))}]"
