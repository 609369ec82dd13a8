from __future__ import annotations

import subprocess
from typing import Any

import pytest

from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.swebench.eval_commands import EvalPlan, check_command, exit_code_of, plan_tests
from ares_exp.tasks.swebench.instance_images import check_template, image_name
from ares_exp.tasks.swebench.rows import parse_row

Row = dict[str, Any]


def plan(row: Row, command: str | None = None, parser: str | None = None) -> EvalPlan:
    return plan_tests(parse_row(row, "here"), test_command=command, log_parser=parser)


def command_of(found: EvalPlan) -> str:
    return found.script.splitlines()[-1]


def test_pytest_on_the_files_of_the_test_patch(row: Row) -> None:
    found = plan(row)
    assert command_of(found) == "python -m pytest -rA --show-capture=no tests/test_calc.py"
    assert (found.log_parser, found.is_rows_own) == ("pytest", False)


def test_a_row_of_a_published_data_set_needs_its_script(row: Row) -> None:
    with pytest.raises(TaskError, match=r"demo__calc-1: .* `eval_script`, found none"):
        plan({**row, "repo": "django/django"})
    assert plan({**row, "repo": "django/django"}, "run {files}").log_parser == "pytest"


def test_files_without_tests_and_removed_ones_are_not_run(row: Row) -> None:
    patch = "".join(
        f"--- {old}\n+++ {new}\n@@ -1 +1 @@\n-a\n+b\n"
        for old, new in (("/dev/null", "b/t/data.json"), ("a/t/gone.py", "/dev/null"), ("/dev/null", "b/t/a b.py"))
    )
    assert command_of(plan({**row, "test_patch": patch}, "run {files}")) == "run 't/a b.py'"
    only_data = patch.split("--- a/t/gone.py")[0]
    with pytest.raises(TaskError, match=r"demo__calc-1: expected its test patch to have files"):
        plan({**row, "test_patch": only_data})
    assert command_of(plan({**row, "test_patch": only_data}, "make test")) == "make test"


def test_a_command_of_ones_own_is_read_as_pytest_unless_told(row: Row) -> None:
    found = plan(row, "x {modules}")
    assert found == EvalPlan(found.script, "pytest", False, found.probe)
    assert plan(row, "x {modules}", "unittest").log_parser == "unittest"
    assert command_of(plan(row, "x {modules}")) == "x tests.test_calc"
    with pytest.raises(ConfigError, match=r"env\.test_command"):
        check_command("  ")


@pytest.mark.parametrize(
    ("command", "probed"),
    [
        ("sh x", 0),
        ("cd y && nothing", 0),
        ("no-such-program {files}", 127),
        ("  no-such-python -m pytest {files}", 127),
        ("./made_by_the_test_patch {files}", None),
        (". venv/bin/activate && pytest", None),
        ("A=1 pytest", None),
    ],
)
def test_what_runs_the_tests_is_probed_for(row: Row, command: str, probed: int | None) -> None:
    probe = plan(row, command).probe
    if probe is None:
        assert probed is None
        return
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == probed
    assert (": command not found" in done.stdout) is (probed == 127)


def test_the_rows_script_tells_what_its_tests_ended_with(row: Row) -> None:
    script = "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\n(exit 3)\n: '>>>>> End Test Output'\ntrue\n"
    found = plan({**row, "eval_script": script, "log_parser": "parse_log_pytest"})
    assert (found.log_parser, found.is_rows_own) == ("parse_log_pytest", True)
    done = subprocess.run(["bash", "-c", found.script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert exit_code_of(done.stderr + done.stdout) == 3
    assert not plan({**row, "eval_script": script}, "x").is_rows_own


def test_images_by_convention_by_the_row_and_by_template(row: Row) -> None:
    named = parse_row({**row, "instance_id": "Demo__Calc-1"}, "here")
    assert image_name(named, None) == "swebench/sweb.eval.x86_64.demo_1776_calc-1:latest"
    assert image_name(named, "my.registry:5000/eval.arm64.{id}:v1") == "my.registry:5000/eval.arm64.demo_1776_calc-1:v1"
    assert image_name(parse_row({**row, "image": "a/b:c"}, "here"), None) == "a/b:c"
    for wrong in ("a/b", "A {id}", ""):
        with pytest.raises(ConfigError, match=r"env\.image_template"):
            check_template(wrong)
