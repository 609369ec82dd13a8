from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from ares_exp.tasks.harbor_task import load_task

MakeTask = Callable[..., Path]


def expected_digest(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for path in sorted(contents):
        total.update(path.encode() + b"\0" + hashlib.sha256(contents[path]).hexdigest().encode() + b"\n")
    return f"sha256:{total.hexdigest()}"


def test_digest_is_over_relative_paths_and_contents(make_task: MakeTask) -> None:
    ignored = (
        "tests/__pycache__/a.pyc",
        "tests/b.pyc",
        "solution/.solve.sh.swp",
        "solution/x~",
        "tests/.DS_Store",
        "notes",
    )
    root = make_task(files={"README.md": "r", **dict.fromkeys(ignored, "")})
    relevant = (
        "task.toml",
        "instruction.md",
        "README.md",
        "environment/Dockerfile",
        "tests/test.sh",
        "solution/solve.sh",
    )
    assert load_task(root).digest == expected_digest({name: (root / name).read_bytes() for name in relevant})
    (root / "tests" / "test.sh").chmod(0o700)
    (root / "tests" / "empty").mkdir()
    assert load_task(root).digest == expected_digest({name: (root / name).read_bytes() for name in relevant})


def test_digest_follows_the_tasks_gitignore(make_task: MakeTask) -> None:
    root = make_task(
        files={".gitignore": "*.log\n!keep.log\n", "tests/a.log": "", "tests/keep.log": "", "tests/b.pyc": ""}
    )
    counted = ("task.toml", "instruction.md", "environment/Dockerfile", "solution/solve.sh")
    tests = ("tests/test.sh", "tests/keep.log", "tests/b.pyc")
    assert load_task(root).digest == expected_digest({name: (root / name).read_bytes() for name in counted + tests})
