from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import TaskError
from ares_exp.tasks.task_toml import TaskToml, parse_task_toml, read_task_toml, warnings_of
from ares_exp.tasks.verification.link_bounds import LinkBounds

PATH = Path("/set/a-task/task.toml")


def parse(text: str) -> TaskToml:
    return parse_task_toml(text, path=PATH).config


def value_of(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


def test_an_empty_file_has_the_defaults() -> None:
    config = parse("")
    assert config.schema_version == "1.4"
    assert config.agent.timeout_sec is None
    assert config.verifier.timeout_sec == 600.0
    assert config.verifier.mode == "shared"
    assert config.environment.build_timeout_sec == 600.0
    assert (config.environment.cpus, config.environment.memory_mb, config.environment.gpus) == (None, None, None)
    assert config.environment.network.mode == "public"
    assert (config.steps, config.artifacts, config.metadata, config.task) == ((), (), {}, None)


ACCEPTED = [
    ('version = "1.0"', "schema_version", "1.0"),
    ('version = "1.0"\nschema_version = "1.3"', "schema_version", "1.3"),
    ('schema_version = "zebra"', "schema_version", "zebra"),
    ('multi_step_reward_strategy = "final"', "multi_step_reward_strategy", "final"),
    ("steps = []", "steps", ()),
    ("[metadata]\nanything = [1, {x = 2}]", "metadata", {"anything": [1, {"x": 2}]}),
    ('[task]\nname = "org/a.b_c-d"', "task.name", "org/a.b_c-d"),
    ('[task]\nname = "0/1"\nauthors = [{name = "A"}]', "task.authors.0.name", "A"),
    ('[agent]\ntimeout_sec = "90"', "agent.timeout_sec", 90.0),
    ("[agent]\ntimeout_sec = true", "agent.timeout_sec", 1.0),
    ("[agent]\ntimeout_sec = inf", "agent.timeout_sec", math.inf),
    ("[agent]\ntimeout_sec = -5", "agent.timeout_sec", -5.0),
    ("[agent]\nuser = 1000", "agent.user", 1000),
    ('[agent]\nuser = "1000:1000"', "agent.user", "1000:1000"),
    ('[agent]\nuser = "1000"', "agent.user", "1000"),
    ("[environment]\ncpus = 2.0", "environment.cpus", 2),
    ("[environment]\ncpus = 0.5", "environment.cpus", 0.5),
    ("[environment]\ncpus = -1", "environment.cpus", -1),
    ("[environment]\nmemory_mb = 2048.0", "environment.memory_mb", 2048),
    ('[environment]\nmemory_mb = "2048"', "environment.memory_mb", 2048),
    ("[environment]\nmemory_mb = -1", "environment.memory_mb", -1),
    ('[environment]\nos = "Windows"', "environment.os", "windows"),
    ('[environment]\ntpu = {type = "v5e", topology = "2x4"}', "environment.tpu.chips", 8),
    ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck.retries", 3),
    ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck.start_interval_sec", 5.0),
    ('[verifier]\nenvironment_mode = "separate"', "verifier.mode", "separate"),
    ("[verifier.environment]", "verifier.mode", "separate"),
    ('[[verifier.collect]]\ncommand = "true"', "verifier.collect.0.timeout_sec", 60.0),
    # legacy sizes
    ('[environment]\nmemory = "2G"', "environment.memory_mb", 2048),
    ('[environment]\nmemory = "2g"', "environment.memory_mb", 2048),
    ('[environment]\nmemory = " 2G "', "environment.memory_mb", 2048),
    ('[environment]\nmemory = "1.5G"', "environment.memory_mb", 1536),
    ('[environment]\nmemory = "512M"', "environment.memory_mb", 512),
    ('[environment]\nmemory = "512.9M"', "environment.memory_mb", 512),
    ('[environment]\nmemory = "1048576K"', "environment.memory_mb", 1024),
    ("[environment]\nmemory = 2048", "environment.memory_mb", None),
    ('[environment]\nmemory = "2G"\nmemory_mb = 2048', "environment.memory_mb", 2048),
    ('[environment]\nstorage = "10G"', "environment.storage_mb", 10240),
    ('[verifier.environment]\nmemory = "1G"', "verifier.environment.memory_mb", 1024),
    # legacy network
    ("[environment]\nallow_internet = false", "environment.network.mode", "no-network"),
    ("[environment]\nallow_internet = true", "environment.network.mode", "public"),
    ('[environment]\nallow_internet = false\nnetwork_mode = "public"', "environment.network.mode", "public"),
    ('[environment]\nallow_internet = true\nnetwork_mode = "no-network"', "environment.network.mode", "no-network"),
    ("[environment]\nallow_internet = false\nallowed_hosts = []", "environment.network.mode", "public"),
    ("[verifier.environment]\nallow_internet = false", "verifier.environment.network.mode", "no-network"),
    # network
    ("[environment]\nallowed_hosts = []", "environment.network.mode", "public"),
    ('[environment]\nnetwork_mode = "allowlist"', "environment.network.allowed_hosts", frozenset()),
    (
        '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["A.example."]',
        "agent.network.allowed_hosts",
        frozenset({"a.example"}),
    ),
    # artifacts
    ('artifacts = ["/app/out.txt"]', "artifacts.0.source", "/app/out.txt"),
    ('artifacts = [{source = "/a", destination = ""}]', "artifacts.0.destination", None),
    ('artifacts = [{source = "/a", destination = "x/manifest.json"}]', "artifacts.0.destination", "x/manifest.json"),
    ('artifacts = ["relative"]', "artifacts.0.service", "main"),
    # MCP
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "http://h"', "environment.mcp_servers.0.transport", "sse"),
    (
        '[[environment.mcp_servers]]\nname = "a"\nurl = "u"\ntransport = "http"',
        "environment.mcp_servers.0.transport",
        "streamable-http",
    ),
    (
        '[[environment.mcp_servers]]\nname = "a"\nurl = "u"\n'
        'headers = {Authorization = "Bearer ${KEY}", X-Tokens = "9"}',
        "environment.mcp_servers.0.headers",
        {"Authorization": "Bearer ${KEY}", "X-Tokens": "9"},
    ),
    # steps
    ('[[steps]]\nname = "erster Schritt ü"', "steps.0.verifier.timeout_sec", 600.0),
    ('[[steps]]\nname = "a"\nmin_reward = {x = "0.5"}', "steps.0.min_reward", {"x": 0.5}),
]


@pytest.mark.parametrize(("text", "field", "expected"), ACCEPTED)
def test_accepted(text: str, field: str, expected: object) -> None:
    found = value_of(parse(text), field)
    assert found == expected
    assert type(found) is type(expected)


REFUSED = [
    ("schema_version = 1", "schema_version"),
    ('multi_step_reward_strategy = "sum"', "multi_step_reward_strategy"),
    ("[task]", "task.name"),
    ('[task]\nname = "bare"', "task.name"),
    ('[task]\nname = "-org/a"', "task.name"),
    ('[task]\nname = "org/a..b"', "task.name"),
    ('[task]\nname = "org/a/b"', "task.name"),
    ('[task]\nname = "örg/a"', "task.name"),
    ('[task]\nname = "org/a\\n"', "task.name"),
    ('[task]\nname = "org/a"\nversion = ""', "task.version"),
    ('[task]\nname = "org/a"\nauthors = [{email = "x"}]', "task.authors[0].name"),
    ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
    ('[agent]\ntimeout_sec = "soon"', "agent.timeout_sec"),
    ("[agent]\nuser = [1]", "agent.user"),
    ("[environment.env]\nA = 1", "environment.env.A"),
    ("[verifier.env]\nA = true", "verifier.env.A"),
    ("[solution.env]\nA = 1.5", "solution.env.A"),
    ("[environment]\ncpus = nan", "environment.cpus"),
    ("[environment]\ncpus = inf", "environment.cpus"),
    ("[environment]\nmemory_mb = 2048.5", "environment.memory_mb"),
    ("[environment]\ndocker_image = 5", "environment.docker_image"),
    ('[environment]\nos = "beos"', "environment.os"),
    ('[environment]\ntpu = {type = "", topology = "2x2"}', "environment.tpu.type"),
    ('[environment]\ntpu = {type = "v5e", topology = "4"}', "environment.tpu.topology"),
    ('[environment]\ntpu = {type = "v5e", topology = "02x2"}', "environment.tpu.topology"),
    ("[environment.healthcheck]", "environment.healthcheck.command"),
    ('[environment]\nmemory = "2GB"', "environment: memory:"),
    ('[environment]\nmemory = "2Gi"', "environment: memory:"),
    ('[environment]\nmemory = "2048"', "environment: memory:"),
    ('[environment]\nmemory = ""', "environment: memory:"),
    ('[environment]\nmemory = "G"', "environment: memory:"),
    ('[environment]\nmemory = "infG"', "environment: memory:"),
    ('[environment]\nmemory = "2G"\nmemory_mb = 4096', "environment: memory = '2G' contradicts memory_mb = 4096"),
    ('[environment]\nmemory = "4G"\nmemory_mb = "4096"', "environment: memory = '4G' contradicts memory_mb = '4096'"),
    ('[environment]\nstorage = "1T"', "environment: storage:"),
    ('[environment]\nallow_internet = false\nallowed_hosts = ["a"]', "allowed_hosts needs network_mode"),
    ('[environment]\nallowed_hosts = ["a"]', "allowed_hosts needs network_mode"),
    ('[environment]\nnetwork_mode = "no-network"\nallowed_hosts = ["a"]', "allowed_hosts needs network_mode"),
    ('[environment]\nnetwork_mode = "Public"', "environment.network_mode"),
    ("[agent]\nallowed_hosts = []", "agent: allowed_hosts needs network_mode"),
    ("[verifier]\nallowed_hosts = []", "verifier: allowed_hosts needs network_mode"),
    ('[verifier]\nnetwork_mode = "public"\nallowed_hosts = ["a"]', "verifier: allowed_hosts needs network_mode"),
    ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["http://a"]', "environment.allowed_hosts[0]"),
    ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "verifier: [verifier.environment] needs"),
    ('[verifier]\nenvironment_mode = "both"', "verifier.environment_mode"),
    ("[[verifier.collect]]", "verifier.collect[0].command"),
    ('artifacts = ["/a/../b"]', "artifacts[0]"),
    ('artifacts = [{source = "/a", destination = "/b"}]', "artifacts[0].destination"),
    ('artifacts = [{source = "/a", destination = "../b"}]', "artifacts[0].destination"),
    ('artifacts = [{source = "/a", destination = "a\\\\b"}]', "artifacts[0].destination"),
    ('artifacts = [{source = "/a", destination = "."}]', "artifacts[0].destination"),
    ('artifacts = [{source = "/a", destination = "manifest.json/"}]', "artifacts[0].destination"),
    ('artifacts = [{source = "a", service = "db"}]', "artifacts[0]: expected an absolute source"),
    ('artifacts = [{source = "/a", service = "-db"}]', "artifacts[0].service"),
    ('[[environment.mcp_servers]]\nname = "a"', "needs url"),
    ('[[environment.mcp_servers]]\nname = "a"\ntransport = "stdio"', "needs command"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {X-Api-Key = "k"}', "looks like a credential"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {Cookie = "${A:-x}"}', "looks like a credential"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {"a b" = "k"}', "expected a header name"),
    ('[[environment.mcp_servers]]\nname = "a"\nurl = "u"\nheaders = {A = "k\\nB: c"}', "on one line"),
    ("[[steps]]", "steps[0].name"),
    ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', "expected different step names"),
    *[
        (f"[[steps]]\nname = {name}", "steps[0].name")
        for name in ("' '", "'..'", "'a.'", "'a '", "'a/b'", "'a\\b'", "'a:b'", "'CON'", "'nul.txt'", f"'{'é' * 128}'")
    ],
    ('[[steps]]\nname = "a"\nmin_reward = "high"', "steps[0].min_reward"),
    ("[agent", "expected TOML 1.0"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: ")
    assert said in message
    assert "Correct" in message


def test_the_message_says_what_was_found() -> None:
    with pytest.raises(TaskError, match=r"environment.memory_mb: expected a valid integer.*'lots' \(str\)"):
        parse('[environment]\nmemory_mb = "lots"')


def test_every_wrong_field_is_named() -> None:
    with pytest.raises(TaskError, match=r"agent\.timeout_sec.*verifier\.timeout_sec"):
        parse('[agent]\ntimeout_sec = "a"\n[verifier]\ntimeout_sec = "b"')


@pytest.mark.parametrize("content", [b"\xff\xfe", b'a = "\xe9"'])
def test_a_file_that_is_not_utf8(tmp_path: Path, content: bytes) -> None:
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
    (
        "[environment]\nmemory = 2048",
        ["environment.memory = 2048 is no size string and sets no limit; write memory_mb = 2048"],
    ),
    ('[environment]\nmemory = "2G"', ["environment.memory is the old name of memory_mb"]),
    ('[verifier.environment]\nstorage = "2G"', ["verifier.environment.storage is the old name of storage_mb"]),
    ("[environment]\nallow_internet = true", ["environment.allow_internet is the old spelling of network_mode"]),
    (
        "[environment]\nallow_internet = false\nallowed_hosts = []",
        [
            "environment.allow_internet = false does nothing beside allowed_hosts = []; "
            'write network_mode = "no-network"'
        ],
    ),
    (
        "[environment]\nallow_internet = false\nnetwork_mode = 'public'",
        ["environment.allow_internet is ignored beside network_mode"],
    ),
    ("[environment]\ngpu_types = ['H100']", ["environment.gpu_types is not enforced"]),
]


@pytest.mark.parametrize(("text", "expected"), WARNED)
def test_warnings(text: str, expected: list[str]) -> None:
    assert warnings_of(parse_task_toml(text, path=PATH)) == expected
