"""Objects that can be hidden, with their other names and facts, bundled or from a file."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import MAX_YAML_BYTES, read_record, read_yaml

BUNDLED = Path(__file__).parent / "objects.yaml"
SUFFIXES = (".txt", ".yaml", ".yml", ".json")
SHOWN_PROBLEMS = 3
_EXPECTED = ("a dictionary or an instance of HiddenObject", "a name or a mapping")


def _one_line(text: str) -> str:
    if not text.isprintable() or not any(char.isalnum() for char in text):
        raise ValueError("expected one line of text with a letter or a digit in it")
    return " ".join(text.split())


def _named(entry: Any) -> Any:
    """Makes a mapping of an object that is written as its name alone."""
    return {"name": entry} if isinstance(entry, str) else entry


@functools.lru_cache(maxsize=4096)  # asked for in every report
def _task_name(title: str) -> str:
    return "-".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", title).casefold()))


_Name = Annotated[str, Field(strict=True, max_length=80), AfterValidator(_one_line)]
_Fact = Annotated[str, Field(strict=True, max_length=300), AfterValidator(_one_line)]
_STRICT = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class HiddenObject:
    """An object to guess.

    Attributes:
        title: Its name; `name` in a file.
        aliases: Other names: guessing one of these is right, too.
        facts: True statements about it, for the oracle; a few words each.
    """

    title: Annotated[_Name, Field(validation_alias="name")]
    aliases: Annotated[tuple[_Name, ...], Field(max_length=100)] = ()
    facts: Annotated[tuple[_Fact, ...], Field(max_length=500)] = ()

    @property
    def name(self) -> str:
        """Name of the task: the title in lower case, with hyphens between its words."""
        return _task_name(self.title)

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return self.title, *self.aliases

    @property
    def digest(self) -> str:
        """Digest of everything about it."""
        said = json.dumps([self.title, self.aliases, self.facts])
        return f"sha256:{hashlib.sha256(said.encode()).hexdigest()}"


@dataclass(frozen=True, config=_STRICT)
class ObjectSet:
    """Objects, in order.

    Attributes:
        objects: The objects.
        complete_facts: Whether a fact or a name that one object has and another has not is false of that one.
    """

    objects: Annotated[
        tuple[Annotated[HiddenObject, BeforeValidator(_named)], ...], Field(min_length=1, max_length=20_000)
    ]
    complete_facts: Annotated[bool, Field(strict=True)] = False

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All facts and names, if one that an object does not have is false of it; else nothing."""
        if not self.complete_facts:
            return ()
        return tuple(dict.fromkeys(text for one in self.objects for text in (*one.facts, *one.names)))


def load_objects(path: Path | None = None) -> ObjectSet:
    """Reads a file of objects, by default the bundled one. Blocking.

    A `.txt` has a name in each line; empty lines and those that start with `#` do not count. A `.yaml` or `.json` has a
    list of names, or of mappings with `name`, `aliases` and `facts`; or a mapping with that list as `objects` and with
    `complete_facts` (see `ObjectSet`; false by default).

    Raises:
        ConfigError: It cannot be read, is no such file, has no object, or two of the same name.
    """
    path = path or BUNDLED
    try:
        found = _read(path)
    except OSError as error:
        raise ConfigError(f"`env.objects`: {path} cannot be read: {error.strerror or error}.") from None
    try:
        loaded = pydantic.TypeAdapter(ObjectSet).validate_python(
            found if isinstance(found, dict) else {"objects": found}
        )
    except pydantic.ValidationError as error:
        raise ConfigError(_explained(path, error)) from None
    known: dict[str, HiddenObject] = {}
    for one in loaded.objects:
        if (other := known.setdefault(one.name, one)) is not one:
            raise ConfigError(
                f"Expected objects of different names in {path}, got {other.title!r} and {one.title!r}, which both "
                f"are the task `{one.name}`. Make one of them an alias, or name it differently."
            )
    return loaded


def _read(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"Expected `env.objects` to be a file that ends in {', '.join(SUFFIXES)}, got {path}.")
    if suffix != ".txt":
        return read_yaml(path)
    text = read_record(path, max_bytes=MAX_YAML_BYTES).decode("utf-8-sig", errors="replace")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _explained(path: Path, error: pydantic.ValidationError) -> str:
    problems = error.errors(include_url=False)
    shown = [
        f"`{'.'.join(map(str, item['loc']))}`: {item['msg'].removeprefix('Value error, ').replace(*_EXPECTED)} "
        f"(got {item['input']!r:.60})"
        for item in problems[:SHOWN_PROBLEMS]
    ]
    more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
    return (
        f"{path} has no objects for twenty questions: {'; '.join([*shown, *more])}. Expected a list of names, or of "
        "mappings with `name`, `aliases` and `facts`. In YAML, words such as yes, no and null are text only in quotes."
    )
