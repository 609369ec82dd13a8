"""The instruction text of an agent."""

from __future__ import annotations

from pathlib import Path

from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.verification.link_bounds import LinkBounds


def strip_canary(text: str) -> str:
    """Drops leading canary lines, then leading blank lines.

    A canary line is a one-line HTML comment or a line starting with `#` that contains the word "canary": a marker
    against training on the file, not meant for the agent.
    """
    lines = text.split("\n")
    while lines and _is_canary(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _is_canary(line: str) -> bool:
    is_comment = line.startswith("<!--") and line.endswith("-->")
    return "canary" in line.lower() and (is_comment or line.startswith("#"))


def read_instruction(path: Path, bounds: LinkBounds) -> str:
    """Reads the instruction in `path` as the agent sees it; may be empty.

    Raises:
        TaskError: The file is missing, no UTF-8 text, or behind a link that leaves the bounds.
    """
    try:
        return strip_canary(bounds.read_text(path))
    except FileNotFoundError:
        raise TaskError(f"{path}: expected the text that the agent is given, found no file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: expected readable UTF-8 text, got: {error}.") from None


def read_extra_instruction(path: Path) -> str:
    """Reads the text of a file of `env.extra_instruction_paths`.

    Raises:
        ConfigError: The file is missing or no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a NUL in its name, as a recorded config may have it, is a ValueError
        raise ConfigError(
            f"Expected `env.extra_instruction_paths` to be readable UTF-8 files, got {path}: {error}."
        ) from None
