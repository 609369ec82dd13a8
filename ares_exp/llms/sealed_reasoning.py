"""Reasoning as wires carry it that ask for a seal: what a client cannot read and gives back as it is.

Providers seal their reasoning. What another engine wrote has no seal, or another kind of one: it gets one of ours,
which says all that the wire has no place for.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode

from ares_exp.llms.response import ThinkingData

_PREFIX = "ares-exp."


def seal(piece: ThinkingData) -> str:
    """Makes an opaque text from which `unsealed` gets what is not readable of the piece."""
    said = {"signature": piece.signature, "redacted": piece.content if piece.redacted else None}
    return _PREFIX + urlsafe_b64encode(json.dumps(said).encode()).decode()


def unsealed(opaque: str, text: str) -> ThinkingData | None:
    """Returns the piece that was sealed, with the text that could be read of it; `None` of another's seal."""
    if not opaque.startswith(_PREFIX):
        return None
    try:
        said = json.loads(urlsafe_b64decode(opaque[len(_PREFIX) :].encode()))
        signature, redacted = said["signature"], said["redacted"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(signature, str | None) and isinstance(redacted, str | None)):
        return None
    return ThinkingData(text if redacted is None else redacted, signature, redacted is not None)
