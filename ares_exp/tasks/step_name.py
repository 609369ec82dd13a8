"""Names of steps: directory names that every file system accepts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)


def check_step_name(name: str) -> str:
    """Returns `name` unchanged.

    Raises:
        ValueError: It is no portable directory name.
    """
    complaint = _complaint(name)
    if complaint:
        raise ValueError(f"expected a portable directory name, got {name!r}, which {complaint}")
    return name


def _complaint(name: str) -> str | None:
    checks = (
        (not name.strip(), "is blank"),
        (name in (".", ".."), "means another directory"),
        (name.endswith((".", " ")), "ends in a dot or a space"),
        (_FORBIDDEN.search(name) is not None, "holds a character that some file systems refuse"),
        (_DEVICES.fullmatch(name) is not None, "is the name of a Windows device"),
        (len(name.encode()) > 255, "is longer than 255 bytes"),
    )
    return next((complaint for wrong, complaint in checks if wrong), None)


def check_unique(names: Iterable[str]) -> None:
    """Refuses names that some file system would not tell apart.

    Raises:
        ValueError: Two are equal after Unicode normalisation and case folding.
    """
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        if key in seen:
            raise ValueError(f"expected different step names, got {seen[key]!r} and {name!r}")
        seen[key] = name
