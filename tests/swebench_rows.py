"""A small data set in the form of SWE-bench: a git repository with a bug, its fix, and what came later."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.tasks.swebench.swebench_task import SweBenchTask, official_version

BUGGY = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
FIXED = BUGGY.replace("a - b", "a + b")
OLD_TESTS = (
    "import unittest\n\nimport calc\n\n\nclass Tests(unittest.TestCase):\n"
    "    def test_double(self):\n        self.assertEqual(calc.double(4), 8)\n"
)
NEW_TESTS = OLD_TESTS + "\n    def test_add(self):\n        self.assertEqual(calc.add(2, 3), 5)\n"
REPO = "demo/calc"

F2P = ["test_add (tests.test_calc.Tests.test_add)"]
P2P = ["test_double (tests.test_calc.Tests.test_double)"]

EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
rm -rf tests/test_calc.py
git checkout {base} tests/test_calc.py
git apply -v - <<'EOF_114329324912'
{patch}
EOF_114329324912
: '>>>>> Start Test Output'
python3 -m unittest -v tests.test_calc
: '>>>>> End Test Output'
git checkout {base} tests/test_calc.py
"""

HARNESS = {
    "swebench-5.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: swebench\nVersion: 5.0.0\n",
    "swebench/__init__.py": "",
    "swebench/types.py": "import types\n\nTestSpec = types.SimpleNamespace\n",
    "swebench/harness/__init__.py": "",
    "swebench/harness/grading.py": """\
import re


def get_eval_report(spec, prediction, log_path, include_tests_status):
    assert spec.log_parser == "parse_log_django", spec.log_parser
    log = open(log_path).read()
    between = re.search("Start Test Output(.*)>>>>> End Test Output.*Exit Code: (-?[0-9]+)", log, re.DOTALL)
    found = dict(re.findall(r"^(\\S+ \\(.*\\)) \\.\\.\\. (.*)$", between[1], re.MULTILINE)) if between else {}
    if not found or (between[2] != "0" and {*found.values()} == {"ok"}):
        return {spec.instance_id: {"resolved": False}}
    names = {"FAIL_TO_PASS": spec.FAIL_TO_PASS, "PASS_TO_PASS": spec.PASS_TO_PASS}
    good = {kind: [one for one in all if found.get(one) == "ok"] for kind, all in names.items()}
    tests = {kind: {"success": good[kind], "failure": [one for one in all if one not in good[kind]]}
             for kind, all in names.items()}
    return {spec.instance_id: {"resolved": not any(one["failure"] for one in tests.values()), "tests_status": tests}}
""",
}
"""A package with the interface of the official harness, for machines without it. It reads the output of unittest."""


HUB = {
    "datasets/__init__.py": """\
import json
import pathlib


class load_dataset:
    def __init__(self, name, *, split, data_files):
        path = pathlib.Path(name, f"{split}.jsonl")
        self.lines = [json.dumps(one) + "\\n" for one in json.load(open(data_files))] if data_files else open(path)

    def to_json(self, target):
        pathlib.Path(target).write_text("".join(self.lines))
""",
}
"""A package that reads a data set of the hub from a folder of its name, as the library does if there is one."""


def put_harness_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a harness and the library of the hub importable, unless they are installed, here and in child processes."""
    missing = (HARNESS if official_version() is None else {}) | (HUB if find_spec("datasets") is None else {})
    for name, text in missing.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if missing:
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def build_context(folder: Path, repository: Path, base: str) -> Path:
    (folder / "context").mkdir()
    git(repository, "clone", "--quiet", "--bare", ".", str(folder / "context" / "repository"))
    lines = ["FROM python:3.12-slim", "COPY repository /testbed/.git", "WORKDIR /testbed"]
    lines += [f"RUN git config core.bare false && git reset -q --hard {base}"]
    (folder / "context" / "Dockerfile").write_text("\n".join(lines) + "\n")
    return folder / "context"


def use_local_image(context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh_spec(task: SweBenchTask) -> ContainerSpec:
        return ContainerSpec(task.name, context_dir=context, workdir="/testbed", users=frozenset({"root"}))

    monkeypatch.setattr(SweBenchTask, "fresh_spec", property(fresh_spec))


_GIT_ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


def git(repository: Path, *arguments: str, date: str = "2024-01-01T00:00:00Z") -> str:
    env = {**_GIT_ENV, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def make_repository(folder: Path) -> tuple[Path, str]:
    """The repository `folder/demo/calc`, and its commit with the bug; the fix is tagged, and on its branch."""
    repository = folder / REPO
    (repository / "tests").mkdir(parents=True)
    git(repository, "init", "--quiet", "--initial-branch=main")
    for text in ("# Calc\n", "# Calc\n\nSums.\n"):
        (repository / "README.md").write_text(text)
        (repository / "calc.py").write_text(BUGGY)
        (repository / "tests" / "__init__.py").write_text("")
        (repository / "tests" / "test_calc.py").write_text(OLD_TESTS)
        git(repository, "add", "-A")
        git(repository, "commit", "--quiet", "-m", "before")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text(FIXED)
    (repository / "tests" / "test_calc.py").write_text(NEW_TESTS)
    git(repository, "commit", "--quiet", "-am", "the fix", date="2024-02-01T00:00:00Z")
    git(repository, "tag", "-m", "fixed", "v2", date="2024-02-01T00:00:00Z")
    return repository, base


def make_row(repository: Path, base: str, instance_id: str = "demo__calc-1", **columns: Any) -> dict[str, Any]:
    test_patch = git(repository, "diff", base, "main", "--", "tests")
    return {
        "instance_id": instance_id,
        "repo": REPO,
        "base_commit": base,
        "problem_statement": "add(2, 3) is -1.",
        "hints_text": "It subtracts.",
        "patch": git(repository, "diff", base, "main", "--", "calc.py"),
        "test_patch": test_patch,
        "eval_script": EVAL_SCRIPT.format(patch=test_patch, base=base),
        "log_parser": "parse_log_django",
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "version": "1.0",
        "created_at": "2024-02-01T00:00:00Z",
        **columns,
    }


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def reply(command: str) -> str:
    return f"I run it.\n\n```bash\n{command}\n```\n"


SUBMIT = reply("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
