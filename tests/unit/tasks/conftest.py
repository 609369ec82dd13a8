"""Task directories made for one test."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

MakeTask = Callable[..., Path]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """Writes a valid task; `files` adds to it, replaces, or (with `None`) removes."""

    def make(name: str = "a-task", toml: str = "", files: Mapping[str, str | None] | None = None) -> Path:
        content: dict[str, str | None] = {
            "task.toml": toml,
            "instruction.md": "Do it.\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
            "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "#!/bin/bash\ntouch /app/done\n",
            **(files or {}),
        }
        root = tmp_path / "tasks" / name
        root.mkdir(parents=True)
        for relative, text in content.items():
            if text is not None:
                (root / relative).parent.mkdir(parents=True, exist_ok=True)
                (root / relative).write_text(text, encoding="utf-8")
        return root

    return make
