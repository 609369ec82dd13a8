"""The bundled objects of twenty questions, with their other names and their facts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class HiddenObject:
    """An object to guess.

    Attributes:
        title: Its name.
        aliases: Other names; guessing one of these is also right.
        facts: True statements about it, for the oracle; a few words each.
    """

    title: str
    aliases: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the task: the title in lower case, with hyphens between its words."""
        return "-".join(self.title.casefold().split())

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return self.title, *self.aliases

    @property
    def digest(self) -> str:
        """Digest of all its fields."""
        fields = json.dumps([self.title, self.aliases, self.facts])
        return f"sha256:{hashlib.sha256(fields.encode()).hexdigest()}"


def load_objects() -> Sequence[HiddenObject]:
    """Reads the bundled objects. Blocking."""
    entries = yaml.safe_load((Path(__file__).parent / "objects.yaml").read_text("utf-8"))
    return [
        HiddenObject(entry["name"], tuple(entry.get("aliases", ())), tuple(entry.get("facts", ()))) for entry in entries
    ]
