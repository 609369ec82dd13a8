"""Redaction of a payload that is handed on: places on this machine, and values of environment variables."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ares_exp.records.secrets import MASK

KINDS = ("paths", "env")
LEAST_CHARS = 6
"""Length from which on a value of the environment is masked: a shorter one would mask ordinary words."""
_HOMES = re.compile(r"(/home/|/Users/)[^/\s\"'`:;,)]+")
_ASSIGNED = re.compile(r"^(\s*(?:export |declare -x )?[A-Z_][A-Z0-9_]{2,}=).+$", re.MULTILINE)
_ENV_KEYS = re.compile(r"(^|[._])(env|environ|environment|env_vars|env_file|hostname|argv|platform|pid)$")
"""Keys of the config and of the provenance whose values tell of the machine."""


def redactor(kinds: Collection[str], places: Collection[Path] = ()) -> Callable[[Any], Any]:
    """Returns a function that copies a payload without what is to be hidden.

    Args:
        kinds: Of `KINDS`. `paths`: this user's home, the folders of the runs, the present folder, and other users'
            homes become `~`, `RUN`, `.` and a mask. `env`: the values of the environment of this process, of lines
            such as `NAME=value`, and of keys that tell of the machine are masked.
        places: Folders of the runs.
    """
    steps: list[Callable[[str], str]] = []
    if "paths" in kinds:
        steps.append(_paths(places))
    if "env" in kinds:
        steps.append(_environment())
    if not steps:
        return lambda data: data

    def text(value: str) -> str:
        for step in steps:
            value = step(value)
        return value

    return lambda data: _walk(data, text, hide_keys="env" in kinds)


def _walk(data: Any, text: Callable[[str], str], *, hide_keys: bool) -> Any:
    if isinstance(data, str):
        return text(data)
    if isinstance(data, Mapping):
        return {
            text(str(key)): MASK
            if hide_keys and isinstance(value, str) and _ENV_KEYS.search(str(key))
            else _walk(value, text, hide_keys=hide_keys)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        if hide_keys and len(data) == 2 and isinstance(data[0], str) and _ENV_KEYS.search(data[0]):
            return [data[0], MASK]  # a line of the config or the provenance
        return [_walk(value, text, hide_keys=hide_keys) for value in data]
    return data


def _paths(places: Collection[Path]) -> Callable[[str], str]:
    named = {str(place.absolute()): "RUN" for place in places} | {str(place.resolve()): "RUN" for place in places}
    named |= {str(Path.cwd()): "."}
    home = str(Path.home())
    if home not in ("/", "/root"):  # in a container, and in most conversations, that is root's
        named[home] = "~"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    ordered = sorted((one for one in named.items() if len(one[0]) > 1), key=lambda one: -len(one[0]))

    def hidden(text: str) -> str:
        for path, name in ordered:
            text = text.replace(path, name)
        text = _HOMES.sub(lambda found: f"{found[1]}{MASK}", text)
        return re.sub(rf"\b{re.escape(user)}@", f"{MASK}@", text) if user not in ("", "root") else text

    return hidden


def _environment() -> Callable[[str], str]:
    values = sorted({value for value in os.environ.values() if len(value) >= LEAST_CHARS}, key=len, reverse=True)
    hostname = os.uname().nodename
    values += [hostname] if len(hostname) >= LEAST_CHARS else []

    def hidden(text: str) -> str:
        for value in values:
            text = text.replace(value, MASK)
        return _ASSIGNED.sub(lambda found: f"{found[1]}{MASK}", text)

    return hidden
