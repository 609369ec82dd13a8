"""The base class of the tables of task.toml, and the types and error messages that several tables share."""

from __future__ import annotations

import math
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from ares_exp.containers.network_policy import NetworkMode, NetworkPolicy, normalise_host

REMEDY = "Correct the value, or remove the key to get its default."


def _not_negative(seconds: float) -> float:
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"expected a number of seconds, 0 or more, got {seconds}")
    return seconds


Seconds = Annotated[float, AfterValidator(_not_negative)]
"""A duration in seconds, which may be 0 or infinite. Unlike in Harbor, it must not be negative."""

User = str | int
EnvVars = dict[str, str]


class TomlTable(BaseModel):
    """Base class of the tables of task.toml.

    A key with a number also accepts a string such as `"60"`, but a key with a string does not accept a number. Unknown
    keys have no effect. `unknown_keys` returns them for warnings.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown_keys(self) -> list[str]:
        """Returns the unknown keys in this table and its nested tables, as dotted names such as `verifier.color`."""
        return [*(self.model_extra or {}), *_unknown_below(self)]


def _unknown_below(table: TomlTable) -> Iterator[str]:
    for name in type(table).model_fields:
        value = getattr(table, name)
        items = {f"{name}[{i}]": item for i, item in enumerate(value)} if isinstance(value, tuple) else {name: value}
        for place, item in items.items():
            if isinstance(item, TomlTable):
                yield from (f"{place}.{key}" for key in item.unknown_keys())


def explain(error: ValidationError, raw: object, *, root: str = "task.toml") -> str:
    """Returns a description of each invalid field of `raw`: its name, its expected value and its actual value.

    `raw` is the data that failed the validation. `root` is its name in the message, such as `task.toml`.
    """
    by_field: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        field = _field(item["loc"], raw, missing=item["type"] == "missing") or root
        by_field.setdefault(field, []).append(_expectation(item["type"], item["msg"], item["input"]))
    return "; ".join(f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in by_field.items())


def _field(location: Sequence[str | int], raw: object, *, missing: bool) -> str:
    """Returns the dotted name of a field from its `location` in a pydantic error, without names of union members."""
    parts: list[str] = []
    for key in location:
        is_item = isinstance(raw, list) and isinstance(key, int) and key < len(raw)
        present = is_item or (isinstance(raw, dict) and key in raw)
        if present or missing:
            parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
        if not present:
            break
        raw = raw[key]  # type: ignore[index]
    return "".join(parts).removeprefix(".")


def _expectation(kind: str, message: str, found: object) -> str:
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message.replace('Input should be', 'expected')}, got {reprlib.repr(found)} ({type(found).__name__})"


AllowedHost = Annotated[str, AfterValidator(normalise_host)]


class PhaseTable(TomlTable):
    """A table that may set the network of one phase (`[agent]`, `[verifier]`)."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[AllowedHost, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_mode(self) -> Self:
        if self.network is None and self.allowed_hosts is not None:
            raise ValueError('allowed_hosts needs network_mode = "allowlist", got no network_mode')
        return self

    @property
    def network(self) -> NetworkPolicy | None:
        """Network policy of this phase; `None` if this table sets no `network_mode`, so that another table applies."""
        mode = self.network_mode
        return None if mode is None else NetworkPolicy(mode, frozenset(self.allowed_hosts or ()))


_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)


def check_step_name(name: str) -> str:
    """Returns `name` unchanged. Raises `ValueError` if some operating systems do not allow it as a directory name."""
    checks = (
        (not name.strip(), "is blank"),
        (name in (".", ".."), "means another directory"),
        (name.endswith((".", " ")), "ends in a dot or a space"),
        (_FORBIDDEN.search(name) is not None, "contains a character that some file systems reject"),
        (_DEVICES.fullmatch(name) is not None, "is the name of a Windows device"),
        (len(name.encode()) > 255, "is longer than 255 bytes"),
    )
    for wrong, complaint in checks:
        if wrong:
            raise ValueError(f"expected a portable directory name, got {name!r}, which {complaint}")
    return name


def check_unique(names: Iterable[str]) -> None:
    """Raises `ValueError` if two names are equal, ignoring case and Unicode normalisation."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        if key in seen:
            raise ValueError(f"expected different step names, got {seen[key]!r} and {name!r}")
        seen[key] = name
