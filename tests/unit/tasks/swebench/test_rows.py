"""Rows of data sets, and grades by the official harness."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.child_process import ChildProcess
from ares_exp.errors import ConfigError, PreflightError, TaskError, VerifierError
from ares_exp.tasks.swebench.rows import Dataset, SweBenchRow, find_dataset, load_rows, parse_row
from ares_exp.tasks.swebench.swebench_task import (
    official_report,
    official_version,
    rewards,
    ungraded,
)
from tests.swebench_rows import F2P, P2P, put_harness_on_path, write_rows

Row = dict[str, Any]
has_datasets = importlib.util.find_spec("datasets") is not None


def load(path: Path) -> list[SweBenchRow]:
    return load_rows(find_dataset(str(path), "test"), child=ChildProcess(), timeout_sec=60)


def test_tests_may_be_json_text_or_lists(row: Row) -> None:
    as_lists = {**row, "FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P}
    for data in (row, as_lists):
        found = parse_row(data, "here")
        assert (found.fail_to_pass, found.pass_to_pass) == (tuple(F2P), tuple(P2P))
    assert parse_row(row, "a").digest == parse_row(as_lists, "b").digest


def test_digest_depends_on_the_content(row: Row) -> None:
    one = parse_row(row, "here").digest
    assert parse_row({**row, "not_a_column": 1}, "here").digest == one
    assert parse_row({**row, "hints_text": "other"}, "here").digest != one


def test_null_column_becomes_its_default(row: Row) -> None:
    found = parse_row({**row, "hints_text": None, "image": None, "eval_type": None, "image_assets": None}, "here")
    assert (found.hints_text, found.image) == ("", "")
    assert found.eval_type == "pass_and_fail"


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("instance_id", "../up", "instance_id: "),
        ("instance_id", "a b", "instance_id: "),
        ("repo", "calc", "repo: "),
        ("repo", "../../x", "repo: "),
        ("base_commit", "main", "base_commit: "),
        ("base_commit", "--upload-pack=x", "base_commit: "),
        ("problem_statement", 3.5j, "problem_statement: "),
        ("problem_statement", "\ud800", "unicode string"),
        ("patch", "x" * (16 * 2**20 + 1), "patch: "),
        ("FAIL_TO_PASS", "[", "FAIL_TO_PASS: expected a list, or a list as JSON text"),
        ("FAIL_TO_PASS", "[]", "FAIL_TO_PASS: "),
        ("PASS_TO_PASS", [1.5j], "PASS_TO_PASS[0]: "),
        ("PASS_TO_PASS", [""], "PASS_TO_PASS[0]: "),
        ("image", "a b", "image: "),
        ("log_parser", "os.system", "log_parser: "),
        ("eval_type", "other", "eval_type: "),
        ("image_assets", "[1]", "image_assets: "),
    ],
)
def test_wrong_column_is_named(row: Row, column: str, value: Any, told: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_row({**row, column: value}, "rows.jsonl: row 7")
    assert str(caught.value).startswith("rows.jsonl: row 7")
    assert told in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_missing_column_is_named(row: Row) -> None:
    del row["base_commit"]
    with pytest.raises(TaskError, match=r"row 1 \('demo__calc-1'\): base_commit: this key is required"):
        parse_row(row, "row 1")


def test_only_rows_with_assets_are_multimodal(row: Row) -> None:
    asset = {"test_patch": [{"path": "a.png", "url": "https://example.org/a.png"}]}
    for value, expected in ((None, False), ("", False), ("{}", False), ({"patch": []}, False), (asset, True)):
        assert parse_row({**row, "image_assets": value}, "here").is_multimodal is expected
    assert parse_row({**row, "image_assets": json.dumps(asset)}, "here").is_multimodal


def test_other_file_formats_use_the_datasets_library(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_harness_on_path(tmp_path / "library", monkeypatch)
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert load(tmp_path / "rows.json") == load(write_rows(tmp_path / "rows.jsonl", row))
    (tmp_path / "rows.json").write_text("3")
    with pytest.raises(PreflightError, match=r"rows\.json could not be loaded"):
        load(tmp_path / "rows.json")


def test_blank_lines_count_as_line_numbers(row: Row, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n\n" + json.dumps({**row, "repo": "x"}) + "\n")
    with pytest.raises(TaskError, match=r"rows\.jsonl: row 4 "):
        load(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", b"", "found none"),
        ("rows.jsonl", b"{", "row 1: invalid JSON"),
        ("rows.jsonl", b"[1]", "row 1: expected a table"),
        ("rows.jsonl", b"[" * 100_000, "row 1: invalid JSON"),
        ("rows.jsonl", b"\xff", "row 1: invalid JSON"),
    ],
)
def test_broken_file_is_reported(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=told):
        load(tmp_path / name)


def test_missing_file_and_directory_are_reported(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("none.jsonl", "folder.jsonl"):
        with pytest.raises(TaskError, match=name):
            load(tmp_path / name)


def test_duplicate_name_is_refused(row: Row, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="row 2: an earlier row also has the name 'demo__calc-1'"):
        load(write_rows(tmp_path / "rows.jsonl", row, row))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("verified", "SWE-bench/SWE-bench_Verified"),
        ("Lite", "SWE-bench/SWE-bench_Lite"),
        ("full", "SWE-bench/SWE-bench"),
        ("princeton-nlp/SWE-bench_Verified", "princeton-nlp/SWE-bench_Verified"),
    ],
)
def test_data_set_names_of_the_hub_are_resolved(given: str, name: str) -> None:
    assert find_dataset(given, "dev") == Dataset(None, name, "dev")


@pytest.mark.parametrize("given", ["", "mine", "SWE-bench/SWE-bench_Multimodal", "../x/y", "a/b/c", "--help/x"])
def test_unknown_data_set_names_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="verified, lite, full"):
        find_dataset(given, "test")


@pytest.mark.skipif(not has_datasets, reason="the package datasets is not installed")
def test_rows_are_loaded_through_the_datasets_library(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo" / "rows").mkdir(parents=True)  # the library takes a folder of that name for the data set
    expected = load(write_rows(tmp_path / "demo" / "rows" / "test.jsonl", row))
    for name, value in (("HF_HOME", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert load_rows(Dataset(None, "demo/rows", "test"), child=ChildProcess(), timeout_sec=100) == expected
    with pytest.raises(PreflightError, match=r"demo/rows \(split nope\) could not be loaded: .*nope"):
        load_rows(Dataset(None, "demo/rows", "nope"), child=ChildProcess(), timeout_sec=100)


@pytest.mark.skipif(has_datasets, reason="the package datasets is installed")
def test_missing_library_suggests_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'ares-exp\[swebench\]'"):
        load_rows(find_dataset("verified", "test"), child=ChildProcess(), timeout_sec=1)


def test_invalid_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.split"):
        find_dataset("verified", "test; ls")


needs_harness = pytest.mark.skipif(official_version() is None, reason="the package swebench is not installed")


def with_tests(row: dict[str, Any], passing: str, failing: str, parser: str) -> SweBenchRow:
    return parse_row({**row, "FAIL_TO_PASS": [passing], "PASS_TO_PASS": [failing], "log_parser": parser}, "here")


def log(output: str) -> str:
    return f">>>>> Start Test Output\n{output}\n>>>>> End Test Output\n>>>>> Test Exit Code: 1\n"


@needs_harness
@pytest.mark.parametrize(
    ("parser", "output", "passed", "failed"),
    [
        ("parse_log_sympy", "test_fix ok\ntest_bad F\n", "test_fix", "test_bad"),
        ("parse_log_django", "test_a (x.T) ... ok\ntest_b (x.T) ... FAIL\n", "test_a (x.T)", "test_b (x.T)"),
        ("parse_log_requests", "PASSED t.py::a[/x/y]\nFAILED t.py::b - no\n", "t.py::a[/y]", "t.py::b"),
        ("parse_log_pytest", "PASSED t.py::a[log(b)]\nFAILED t.py::b\n", "t.py::a[log(", "t.py::b"),
        ("", "PASSED t.py::a\nFAILED t.py::b - no\n", "t.py::a", "t.py::b"),
    ],
)
async def test_log_formats_of_published_data_sets_are_graded(
    row: dict[str, Any], parser: str, output: str, passed: str, failed: str
) -> None:
    report = await official_report(with_tests(row, passed, failed, parser), log(output))
    assert rewards(report) == {"reward": 0.0, "f2p": 1.0, "p2p": 0.0}
    assert report["reason"] is None


@needs_harness
async def test_unknown_log_parser_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match="parse_log_of_nobody"):
        await official_report(with_tests(row, "a", "b", "parse_log_of_nobody"), log("PASSED a"))


def test_ungraded_run_has_failed_tests_and_a_reason(row: dict[str, Any]) -> None:
    report = ungraded(with_tests(row, "a", "b", ""), "why")
    assert rewards(report) == {"reward": 0.0, "f2p": 0.0, "p2p": 0.0}
    assert (report["tests_status"]["FAIL_TO_PASS"], report["reason"]) == ({"success": [], "failure": ["a"]}, "why")


def test_rewards_are_fractions_of_tests() -> None:
    tests = {"FAIL_TO_PASS": {"success": ["a"], "failure": ["b"]}, "PASS_TO_PASS": {"success": [], "failure": []}}
    assert rewards({"resolved": False, "tests_status": tests}) == {"reward": 0.0, "f2p": 0.5, "p2p": 1.0}
