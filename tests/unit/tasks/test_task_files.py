"""Task files: `task.toml`, its templates, the instruction, and warnings."""

import logging
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import TaskError
from ares_exp.tasks.harbor_task import resolve_env, secret_values
from ares_exp.tasks.task_files import read_instruction
from ares_exp.tasks.task_set import TaskWarnings
from ares_exp.tasks.task_toml import TaskToml, parse_task_toml, read_task_toml, warnings_of
from ares_exp.tasks.verification.link_bounds import LinkBounds

PATH = Path("/set/a-task/task.toml")


def parse(text: str) -> TaskToml:
    return parse_task_toml(text, path=PATH).config


def value_of(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


ACCEPTED = [  # only what is not among the cases of tests/compatibility
    ('[task]\nname = "0/1"\nauthors = [{name = "A"}]', "task.authors.0.name", "A"),
    ("[agent]\ntimeout_sec = true", "agent.timeout_sec", 1.0),
    ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck.start_interval_sec", 5.0),
    ('[verifier.environment]\nmemory = "1G"', "verifier.environment.memory_mb", 1024),
    ('[[steps]]\nname = "a"\nmin_reward = {x = "0.5"}', "steps.0.min_reward", {"x": 0.5}),
]


@pytest.mark.parametrize(("text", "field", "expected"), ACCEPTED)
def test_valid_values_are_accepted(text: str, field: str, expected: object) -> None:
    found = value_of(parse(text), field)
    assert found == expected
    assert type(found) is type(expected)


REFUSED = [
    ("[task]", "task.name"),
    ('[task]\nname = "örg/a"', "task.name"),
    ('[task]\nname = "org/a\\n"', "task.name"),
    ("[verifier]\ntimeout_sec = -5", "verifier.timeout_sec: expected a number of seconds, 0 or more, got -5.0"),
    ("[agent]\nuser = [1]", "agent.user"),
    ("[environment]\ndocker_image = 5", "environment.docker_image"),
    ('[environment]\nmemory = "infG"', "environment: memory:"),
    ('[environment]\nmemory = "2G"\nmemory_mb = 4096', "environment: memory = '2G' contradicts memory_mb = 4096"),
    ('[environment]\nstorage = "1T"', "environment: storage:"),
    ('[environment]\nallow_internet = false\nallowed_hosts = ["a"]', "allowed_hosts needs network_mode"),
    ("[verifier]\nallowed_hosts = []", "verifier: allowed_hosts needs network_mode"),
    ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["http://a"]', "environment.allowed_hosts[0]"),
    ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "verifier: [verifier.environment] needs"),
    ('artifacts = [{source = "a", service = "db"}]', "artifacts[0]: expected an absolute source"),
    ('[[environment.mcp_servers]]\nname = "a"', "needs url"),
    ('[[environment.mcp_servers]]\nname = "a"\ntransport = "stdio"', "needs command"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {X-Api-Key = "k"}', "looks like a credential"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {Cookie = "${A:-x}"}', "looks like a credential"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {"a b" = "k"}', "expected a header name"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {A = "k\\nB: c"}', "on one line"),
    ("[[steps]]", "steps[0].name"),
    ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', "expected different step names"),
    (f"[[steps]]\nname = '{'é' * 128}'", "steps[0].name"),
    ("[agent", "invalid TOML 1.0"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_invalid_values_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: ")
    assert said in message
    assert "Correct" in message


def test_message_contains_the_invalid_value() -> None:
    with pytest.raises(TaskError, match=r"environment.memory_mb: expected a valid integer.*'lots' \(str\)"):
        parse('[environment]\nmemory_mb = "lots"')


def test_every_wrong_field_is_named() -> None:
    with pytest.raises(TaskError, match=r"agent\.timeout_sec.*verifier\.timeout_sec"):
        parse('[agent]\ntimeout_sec = "a"\n[verifier]\ntimeout_sec = "b"')


@pytest.mark.parametrize("content", [b"\xff\xfe", b'a = "\xe9"'])
def test_invalid_utf8_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "task.toml").write_bytes(content)
    with pytest.raises(TaskError, match="UTF-8"):
        read_task_toml(tmp_path / "task.toml", LinkBounds(tmp_path))


WARNED = [
    ("", []),
    ('[task]\nname = "org/a"\ndescription = "d"\n[metadata]\nwhatever = 1', []),
    ("[environment]\nmemory_mb = 5\nnetwork_mode = 'no-network'", []),
    ("colour = 1", ["unknown key colour is ignored"]),
    ("[agent.env]\nA = 'b'", ["unknown key agent.env is ignored"]),
    ("[environment.healthcheck]\ncommand = 'a'\nretry = 1", ["unknown key environment.healthcheck.retry is ignored"]),
    ("artifacts = [{source = '/a', mode = 1}]", ["unknown key artifacts[0].mode is ignored"]),
    ("[[steps]]\nname = 'a'\n[steps.agent]\nx = 1", ["unknown key steps[0].agent.x is ignored"]),
    ('version = "1.0"', ["version is the old name of schema_version"]),
    ('schema_version = "9.9"', ['schema_version "9.9" is unknown, expected 1.0 to 1.4']),
    (
        "[environment]\nmemory = 2048",
        ["environment.memory = 2048 is not a text such as '2G', so it is ignored. Use memory_mb = 2048"],
    ),
    ('[environment]\nmemory = "2G"', ["environment.memory is the old name of memory_mb"]),
    ('[verifier.environment]\nstorage = "2G"', ["verifier.environment.storage is the old name of storage_mb"]),
    ("[environment]\nallow_internet = true", ["environment.allow_internet is the old spelling of network_mode"]),
    (
        "[environment]\nallow_internet = false\nallowed_hosts = []",
        ['environment.allow_internet = false has no effect with allowed_hosts = []. Use network_mode = "no-network"'],
    ),
    (
        "[environment]\nallow_internet = false\nnetwork_mode = 'public'",
        ["environment.allow_internet is ignored because network_mode is set"],
    ),
    ("[environment]\ngpu_types = ['H100']", ["environment.gpu_types is not enforced"]),
]


@pytest.mark.parametrize(("text", "expected"), WARNED)
def test_warnings_name_ignored_keys(text: str, expected: list[str]) -> None:
    assert warnings_of(parse_task_toml(text, path=PATH)) == expected


HOST = {"A": "va", "E": "", "API_KEY": "sk-12345678", "MAX_TOKENS": "1234567890", "SHORT_KEY": "abc"}


@pytest.mark.parametrize(("value", "expected"), [("${M:-${A}}", "${A}"), ("${A}\n", "${A}\n")])
def test_defaults_are_not_resolved_recursively(value: str, expected: str) -> None:
    assert resolve_env({"KEY": value}, where="here", host=HOST) == {"KEY": expected}


@pytest.mark.parametrize(("value", "name"), [("${M}", "M"), ("${ A }", " A "), ("${A-d}", "A-d")])
def test_missing_variable_is_named(value: str, name: str) -> None:
    with pytest.raises(TaskError, match=r"task\.toml: \[verifier\.env\] KEY: .* not set\. Set the") as caught:
        resolve_env({"KEY": value}, where="task.toml: [verifier.env]", host=HOST)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("A-B", "x"), ("", "x"), ("1A", "x"), ("A", "x\0y")])
def test_invalid_variable_names_are_refused(key: str, value: str) -> None:
    with pytest.raises(TaskError, match="expected a variable name"):
        resolve_env({key: value}, where="here", host=HOST)


def test_secrets_are_recognized_by_name() -> None:
    tables = [
        {"JUDGE": "${API_KEY}", "LIMIT": "${MAX_TOKENS}", "PLAIN": "${A}", "OTHER_KEY": "literal-value"},
        {"SECRET_THING": "${MAX_TOKENS}", "B": "${SHORT_KEY}"},
    ]
    assert secret_values(tables[:1], host=HOST) == ("sk-12345678",)
    assert secret_values(tables, host=HOST) == ("sk-12345678", "1234567890")


def test_binary_instruction_is_refused(tmp_path: Path) -> None:
    (tmp_path / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(TaskError, match="UTF-8"):
        read_instruction(tmp_path / "instruction.md", LinkBounds(tmp_path))


def told(*warnings: tuple[str, str]) -> list[str]:
    sentences: list[str] = []
    collected = TaskWarnings()
    for name, sentence in warnings:
        collected.add(name, [sentence])
    collected.tell(sentences.append)
    collected.tell(sentences.append)
    return sentences


def test_equal_warnings_are_merged_with_task_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    many = [(f"task-{n}", f"task-{n}: task.toml: unknown key colour is ignored") for n in range(28)]
    [said] = told(*many)
    assert said == "28 tasks: task.toml: unknown key colour is ignored (task-0, task-1, task-2 and 25 more)"
    assert all(f"task-{n}" in caplog.text for n in range(28)), "the log has them all"


def test_warnings_with_different_numbers_are_merged() -> None:
    limits = [("a", "cpus=1: not enforced"), ("b", "b: cpus=1: not enforced"), ("c", "Task c: cpus=0.5: not enforced")]
    assert told(*limits) == ["3 tasks: cpus=1/0.5: not enforced (a, b, c)"]
    assert told(*((f"t{n}", f"memory_mb={n}: no") for n in range(1, 6))) == [
        "5 tasks: memory_mb=1/2/3/…: no (t1, t2, t3 and 2 more)"
    ]


def test_warnings_with_different_names_are_merged() -> None:
    paths = [(name, f"skipped: /set/{name}/task.toml: no table") for name in ("a", "b-1", "c(2)")]
    assert told(*paths) == ["3 tasks: skipped: /set/…/task.toml: no table (a, b-1, c(2))"]


def test_different_warnings_are_separate() -> None:
    assert told(("a", "one"), ("b", "two"), ("a", "two"), ("c", "step 3 of c")) == [
        "a: one", "2 tasks: two (b, a)", "c: step 3 of c",
    ]  # fmt: skip
