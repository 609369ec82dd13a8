"""`registry.json`: what is valid, and which data set is meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.tasks.task_sources.registry_file import DatasetName, choose, newest, parse_registry

ROW: dict[str, Any] = {"name": "bench", "version": "1.0", "description": "", "tasks": [{"name": "t", "path": "t"}]}


def parsed(*rows: object) -> Any:
    return parse_registry(json.dumps(rows).encode(), where="registry.json")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{**ROW, "version": 1.0}], r"data set 0 \('bench'\): version: .*string"),
        ([{**ROW, "metrics": [{"type": "median"}]}], r"metrics\[0\]\.type: expected"),
        ([{key: value for key, value in ROW.items() if key != "description"}], "description: this key is required"),
        ([ROW, {**ROW, "tasks": [{"name": "t"}]}], r"data set 1 .*tasks\[0\]\.path: this key is required"),
        (
            [{**ROW, "tasks": [{"name": "t", "path": "t", "git_url": "ext::sh"}]}],
            r"tasks\[0\]\.git_url: expected the addr",
        ),
        ([{**ROW, "tasks": [{"name": "t", "path": "t", "git_commit_id": "-x"}]}], "git_commit_id: expected a commit"),
        (["bench"], "data set 0: expected an object, got a str"),
    ],
)
def test_wrong_ones_are_told_by_place(rows: list[object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parsed(*rows)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["1.0", "head", "2.0"], "head"),
        (["1.9", "1.10", "1.2"], "1.10"),
        (["1.0", "v2", "zebra"], "v2"),
        (["1.0", "2.0rc1"], "2.0rc1"),
        (["autumn", "spring", "nightly"], "spring"),
    ],
)
def test_the_newest_version(versions: list[str], expected: str) -> None:
    assert newest(versions) == expected


def test_a_data_set_is_chosen_by_name_and_version() -> None:
    datasets = parsed(ROW, {**ROW, "version": "1.1"}, {**ROW, "name": "other"})
    assert choose(datasets, DatasetName.parse("bench"), where="r").version == "1.1"
    assert choose(datasets, DatasetName.parse("bench@1.0"), where="r").version == "1.0"


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("bnech", r"r has no data set 'bnech'\. Did you mean `bench`\? It has 'bench', 'other'\."),
        ("bench@1.2", r"r has no version '1\.2' of bench\. Did you mean .* It has '1\.0', '1\.1'\."),
    ],
)
def test_an_unknown_one_is_told_what_there_is(wanted: str, complaint: str) -> None:
    datasets = parsed(ROW, {**ROW, "version": "1.1"}, {**ROW, "name": "other"})
    with pytest.raises(ConfigError, match=complaint):
        choose(datasets, DatasetName.parse(wanted), where="r")


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(ConfigError, match="It has none"):
        choose([], DatasetName.parse("bench"), where="r")


@pytest.mark.parametrize(
    ("text", "complaint"), [("org/name", "is a package"), ("", "name@version"), ("a@", "name@version")]
)
def test_names_that_are_none(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DatasetName.parse(text)


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"registry\.json: expected JSON"):
        parse_registry(b"[" * 99_999, where="registry.json")
