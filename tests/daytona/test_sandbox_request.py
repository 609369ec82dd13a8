"""What the service is asked for."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec, Mount
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.daytona.sandbox_request import (
    MAX_DOMAINS,
    MAX_NETWORKS,
    DaytonaOptions,
    check_spec,
    create_params,
    network_settings,
    ttl_minutes,
)
from ares_exp.containers.images.image_plan import ImagePlan, plan_image
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import ConfigError, UnsupportedTaskError

PLAIN = DaytonaOptions()
TASK = ContainerSpec(name="t", docker_image="debian:12")


def allow(*hosts: str) -> NetworkPolicy:
    return NetworkPolicy("allowlist", frozenset(hosts))


def params(
    spec: ContainerSpec = TASK,
    options: DaytonaOptions = PLAIN,
    plan: ImagePlan | None = None,
    directory: Path | None = None,
) -> Any:
    plan = plan or plan_image(spec, options.snapshot).after_start()
    with tempfile.TemporaryDirectory() as empty:
        directory = directory or Path(empty)
        return create_params(spec, options, plan, labels={"a": "b"}, ttl_min=30, directory=directory)


@pytest.mark.parametrize(
    ("asked", "options", "expected", "warned"),
    [
        ({"cpus": 2, "memory_mb": 4096, "storage_mb": 10240}, {}, (2, 4, 10, None), []),
        ({"cpus": 0.5}, {}, (1, None, None, None), ["cpus=0.5: .* uses 1$"]),
        ({"cpus": 1.5}, {}, (2, None, None, None), ["cpus=1.5: .* uses 2$"]),
        ({"memory_mb": 512}, {}, (None, 1, None, None), [r"memory_mb=512: .* uses 1 \(1024 MB\)"]),
        ({"storage_mb": 10000}, {}, (None, None, 10, None), [r"storage_mb=10000: .* uses 10 \(10240 MB\)"]),
        ({"gpus": 2}, {}, (None, None, None, 2), []),
        ({"gpus": 0, "cpus": 1.0}, {}, (1, None, None, None), []),
        (
            {"cpus": 0.5, "memory_mb": 100, "storage_mb": 100},
            {"cpus": 4, "memory_mb": 8192, "storage_mb": 20480},
            (4, 8, 20, None),
            [],
        ),
    ],
)
def test_resources_are_rounded_with_warnings(
    asked: dict[str, Any], options: dict[str, Any], expected: tuple[int | None, ...], warned: list[str]
) -> None:
    spec, chosen = replace(TASK, **asked), DaytonaOptions(**options)
    made = params(spec, chosen).resources
    assert (made.cpu, made.memory, made.disk, made.gpu) == expected
    warnings = check_spec(spec, chosen)
    assert len(warnings) == len(warned)
    for warning, pattern in zip(warnings, warned, strict=True):
        assert re.search(pattern, warning)


def test_snapshot_has_fixed_resources() -> None:
    spec, options = replace(TASK, cpus=2, gpus=1), DaytonaOptions(snapshot="s", memory_mb=2048)
    made = params(spec, options)
    assert made.snapshot == "s"
    assert not hasattr(made, "resources")
    image, resources = check_spec(spec, options)
    assert "container.snapshot=s" in image
    for part in ("cpus=2", "memory_mb=2048", "gpus=1"):
        assert part in resources
    assert check_spec(ContainerSpec(name="t"), DaytonaOptions(snapshot="s")) == []


def test_task_variables_override_image_and_options(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\nENV A=image B=image\n")
    spec = ContainerSpec(name="t", context_dir=tmp_path, env={"B": "task", "C": "task"})
    options = DaytonaOptions(env=dict.fromkeys("ABCD", "option"))
    assert params(spec, options).env_vars == {"B": "task", "C": "task", "D": "option"}


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        (PUBLIC, {}, (False, "", "")),
        (NO_NETWORK, {}, (True, "", "")),
        (allow(), {}, (True, "", "")),
        (allow("pypi.org", "*.a.example"), {}, (False, "", "*.a.example,pypi.org")),
        (allow("10.0.0.0/8", "192.0.2.7"), {}, (False, "10.0.0.0/8,192.0.2.7/32", "")),
        (PUBLIC, {"network": NO_NETWORK}, (True, "", "")),
        (NO_NETWORK, {"network": PUBLIC}, (False, "", "")),
        (NO_NETWORK, {"allowed_hosts": frozenset({"pypi.org"})}, (False, "", "pypi.org")),
        (PUBLIC, {"allowed_hosts": frozenset({"pypi.org"})}, (False, "", "")),
    ],
)
def test_network_settings_follow_the_policy(
    policy: NetworkPolicy, options: dict[str, Any], expected: tuple[bool, str, str]
) -> None:
    chosen = DaytonaOptions(**options)
    settings = network_settings(policy, chosen)
    assert tuple(settings.values()) == expected
    assert list(settings) == ["network_block_all", "network_allow_list", "domain_allow_list"]
    made = params(replace(TASK, network=policy), chosen)
    sent = (made.network_block_all, made.network_allow_list, made.domain_allow_list)
    assert sent == tuple(value or None for value in expected)


@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        (["::1"], "::1"),
        (["2001:db8::/32"], "2001:db8::/32"),
        (["localhost"], "localhost"),
        (["a.xn--p1ai"], "a.xn--p1ai"),
        (["pypi.org", "10.0.0.0/8"], "pypi.org; 10.0.0.0/8"),
        ([f"h{n}.example" for n in range(MAX_DOMAINS + 1)], f"at most {MAX_DOMAINS} names"),
        ([f"10.0.{n}.0/24" for n in range(MAX_NETWORKS + 1)], f"{MAX_NETWORKS} networks"),
    ],
)
def test_unsupported_allow_list_is_rejected(hosts: list[str], named: str) -> None:
    later = replace(TASK, phase_networks=frozenset({allow(*hosts)}))
    with pytest.raises(UnsupportedTaskError) as caught:
        check_spec(later, PLAIN)
    for part in (named, "Task t", "container=docker", "container.network=no-network"):
        assert part in str(caught.value)
    assert check_spec(later, DaytonaOptions(network=NO_NETWORK)) == []


def test_allow_list_may_have_the_maximum_size() -> None:
    assert check_spec(replace(TASK, network=allow(*(f"h{n}.example" for n in range(MAX_DOMAINS)))), PLAIN) == []
    assert check_spec(replace(TASK, network=allow(*(f"10.0.{n}.0/24" for n in range(MAX_NETWORKS)))), PLAIN) == []


def test_build_steps_after_start_have_a_network(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\nCOPY Dockerfile /x\n")
    spec = ContainerSpec(name="t", context_dir=tmp_path, network=NO_NETWORK)
    options = DaytonaOptions(network=NO_NETWORK)
    plan = plan_image(spec, options.snapshot)
    assert params(spec, options, plan.after_start()).network_block_all is None
    assert params(spec, options, plan.stored(tmp_path / "staged", ())).network_block_all is True
    with pytest.raises(ValueError, match="used before it is computed"):
        params(spec, options, plan)


@pytest.mark.parametrize(
    ("lifetime_sec", "ttl_min", "expected"),
    [(None, None, 1440), (600.0, None, 20), (601.0, None, 21), (None, 1, 1), (600.0, 11, 11)],
)
def test_ttl_follows_the_lifetime(lifetime_sec: float | None, ttl_min: int | None, expected: int) -> None:
    assert ttl_minutes(replace(TASK, lifetime_sec=lifetime_sec), DaytonaOptions(ttl_min=ttl_min)) == expected


def test_short_ttl_is_rejected_before_the_run() -> None:
    with pytest.raises(ConfigError) as caught:
        check_spec(replace(TASK, lifetime_sec=600.0), DaytonaOptions(ttl_min=10))
    for part in ("Task t", "600 s", "ttl_min=10 ", "container.ttl_min=20"):
        assert part in str(caught.value)


def test_sdk_gets_only_needed_files(tmp_path: Path) -> None:
    context, staged = tmp_path / "context", tmp_path / "staged"
    (context / "d").mkdir(parents=True)
    for name in ("Dockerfile", "a.txt", "unneeded", "d/script"):
        (context / name).write_text(name)
    text = "FROM x\nARG NAME=a\nCOPY a.txt /x\nCOPY . /d/\n"
    (context / "Dockerfile").write_text(text)
    (context / ".dockerignore").write_text("unneeded\nDockerfile\n")
    spec = ContainerSpec(name="t", context_dir=context)
    plan = plan_image(spec).stored(staged, ())
    image = params(spec, PLAIN, plan, staged).image
    assert image.dockerfile() == text
    parts = {part.archive_path: Path(part.source_path) for part in image._context_list}
    assert parts == {"a.txt": staged / "a.txt", ".": staged}
    files = {str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file()}
    assert files == {"a.txt", "d/script", ".dockerignore", "Dockerfile"}, "the text itself is not beside them any more"


def test_copied_local_directories_give_a_warning(tmp_path: Path) -> None:
    spec = ContainerSpec("t", docker_image="debian:12.9", mounts=(Mount(tmp_path, "/opt/tool", "d1"),))
    (warning,) = DaytonaContainerFactory().check(spec)
    assert warning == "/opt/tool: copied from this machine into every sandbox when the sandbox starts"
