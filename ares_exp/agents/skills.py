"""Skills: directories in a container. Each contains a file `SKILL.md`, which starts with the purpose of the skill."""

from __future__ import annotations

import logging
import posixpath
import re
import shlex
from dataclasses import dataclass

from ares_exp.agents.code_agent import AgentContainer

MAX_SKILLS = 100
MAX_HEAD_BYTES = 4096
MAX_DESCRIPTION_CHARS = 1024

_logger = logging.getLogger(__name__)

_FIELD = re.compile(r"(name|description):[ \t]*(.*)")
_FOLDED = re.compile(r"[>|][+-]?\d?")


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill, as described to an agent.

    Attributes:
        name: Name from `SKILL.md`; defaults to the name of the directory.
        description: Purpose of the skill; empty if `SKILL.md` has no description.
        path: Path of `SKILL.md` in the container.
    """

    name: str
    description: str
    path: str


async def find_skills(container: AgentContainer, folder: str, *, timeout_sec: float) -> list[Skill]:
    """Finds the skills in a directory in the container, sorted by path. Logs a warning if there are no skills.

    Raises:
        ContainerError: The container failed.
    """
    shown = f'n=$((n + 1)); printf "\\0%s\\0" "$f"; head -c {MAX_HEAD_BYTES} "$f" | tr -d "\\0"'
    each = f'[ -f "$f" ] || continue; [ "$n" -lt {MAX_SKILLS} ] || break; {shown}'
    result = await container.exec(
        f"cd {shlex.quote(folder)} && n=0 && for f in */SKILL.md; do {each}; done", timeout_sec=timeout_sec
    )
    parts = result.output.split("\0")[1:]
    if not parts:
        _logger.warning("The agent receives no skills, because %s in the container has no */SKILL.md.", folder)
    return [read_skill(text, posixpath.join(folder, path)) for path, text in zip(parts[::2], parts[1::2], strict=False)]


def read_skill(text: str, path: str) -> Skill:
    """Parses a skill from `text`, the start of its `SKILL.md` at `path`."""
    fields = _front_matter(text)
    name = fields.get("name") or posixpath.basename(posixpath.dirname(path))
    return Skill(name[:100], fields.get("description", "")[:MAX_DESCRIPTION_CHARS], path)


def _front_matter(text: str) -> dict[str, str]:
    """Reads `name` and `description` from the front matter. Supports plain and quoted values, and indented blocks."""
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        return {}
    fields: dict[str, str] = {}
    field = None
    for line in lines[1:]:
        if line.rstrip() in ("---", "..."):
            break
        if found := _FIELD.fullmatch(line):
            field, value = found[1], found[2].strip()
            fields[field] = "" if _FOLDED.fullmatch(value) else value
        elif field is not None and line[:1].isspace():
            fields[field] = f"{fields[field]} {line.strip()}".strip()
        else:
            field = None
    return {name: _unquoted(value) for name, value in fields.items()}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
