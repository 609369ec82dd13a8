"""What is wrong with a Dockerfile, as far as reading it tells: found before the engine is asked to build it."""

from __future__ import annotations

import io
import re
from pathlib import Path

from ares_exp.errors import TaskError, UnsupportedTaskError

# fmt: off
_KNOWN = frozenset({
    "ADD", "ARG", "CMD", "COMMENT", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER",
    "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
})
# fmt: on
_BUILDKIT = re.compile(
    r"^[ \t]*(?:(?P<heredoc>(?:RUN|COPY|ADD)\b.*<<-?['\"]?\w)|RUN\s+(?P<run>--(?:mount|network|security|device)\b)"
    r"|(?:COPY|ADD)\s+(?:--\S+\s+)*(?P<copy>--(?:chmod|link|parents|exclude|checksum|keep-git-dir)\b))",
    re.IGNORECASE | re.MULTILINE,
)


def check_dockerfile(path: Path) -> None:
    """Reads the Dockerfile at `path`; its folder is the build context.

    Raises:
        UnsupportedTaskError: It needs BuildKit, which is not used; with the line and the remedy.
        TaskError: It cannot be read, has an unknown instruction, or copies a file that is not there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read {path}: {error}.") from error
    if (found := _BUILDKIT.search(text)) is not None:
        line = text.count("\n", 0, found.start()) + 1
        feature = found["run"] or found["copy"] or "a here-document"
        raise UnsupportedTaskError(
            f"{path}:{line}: {feature} needs BuildKit, which container=docker does not use. Build the image yourself, "
            "and name it as docker_image in the [environment] table of the task's task.toml."
        )
    _check_instructions(path, text)


def _check_instructions(path: Path, text: str) -> None:
    from dockerfile_parse import DockerfileParser

    for instruction in DockerfileParser(fileobj=io.BytesIO(text.encode())).structure:
        name, value, line = instruction["instruction"], instruction["value"], instruction["startline"] + 1
        if name not in _KNOWN:
            raise TaskError(f"{path}:{line}: expected a Dockerfile instruction, got {name}.")
        if name in ("COPY", "ADD") and "--from" not in value and not value.lstrip().startswith("["):
            _check_sources(path, line, value)


def _check_sources(path: Path, line: int, value: str) -> None:
    """Refuses sources that are not in the context; those with globs, variables or a URL are left to the engine."""
    *sources, _ = [word for word in value.split() if not word.startswith("--")] or [""]
    for source in sources:
        if not re.search(r"[*?\[\]$\\:'\"]", source) and not (path.parent / source.lstrip("/")).exists():
            raise TaskError(f"{path}:{line}: expected {source} in {path.parent}, found no such file.")
