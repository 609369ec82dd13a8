"""What of a task's compose file is refused, and what is made of the rest; without an engine."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.compose.project_file import base_document, complete
from ares_exp.containers.docker.compose.security_policy import check_file
from ares_exp.containers.docker.compose.tool import find_compose, variables
from ares_exp.containers.docker.container import DockerOptions
from ares_exp.containers.docker.engine import Capabilities
from ares_exp.containers.docker.network import NetworkOptions
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError


def options(network: NetworkOptions | None = None, **changed: Any) -> DockerOptions:
    plain = {
        "host": None, "shell": "bash -c", "keep_image": True, "env": {}, "pids_limit": 100, "swap_mb": 0,
        "no_new_privileges": False, "capture": "auto", "compose_max_containers": 4, "compose_max_memory_mb": 512,
        "compose_trusted": False,
    }  # fmt: skip
    return DockerOptions(network=network or NetworkOptions(), **plain | changed)


def refused(folder: Path, text: str, *, after: str = "networks: ", before: str = ". Leave") -> str:
    (folder / "docker-compose.yaml").write_text(text)
    try:
        check_file(ContainerSpec("t", compose_file=folder / "docker-compose.yaml"), options())
    except UnsupportedTaskError as error:
        return str(error).partition(after)[2].partition(before)[0]
    return ""


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("privileged: true", "privileged"),
        ("cap_add: [SYS_ADMIN]", "cap_add"),
        ("devices: [/dev/sda]", "devices"),
        ("network_mode: host", "network_mode (host)"),
        ("pid: host", "pid (host)"),
        ("ipc: host", "ipc (host)"),
        ("userns_mode: host", "userns_mode"),
        ("security_opt: [seccomp:unconfined]", "security_opt"),
        ("volumes: [/var/run/docker.sock:/x:ro]", "volumes (/var/run/docker.sock)"),
        ("volumes: ['./a/../..:/x:ro']", "volumes (./a/../..)"),
        ("volumes: ['./out:/x:ro']", "volumes (./out)"),
        ("volumes: ['./data:/x']", "volumes (./data, which is not mounted read-only)"),
        ("volumes: [{type: bind, source: /etc, target: /x, read_only: true}]", "volumes (/etc)"),
        ("volumes: [{type: npipe, source: a, target: b}]", "volumes (npipe)"),
        ("volumes_from: ['container:x']", "volumes_from"),
        ("build: ..", "build.context"),
        ("build: {context: ., dockerfile: ../../x}", "build.dockerfile"),
        ("build: {context: ., additional_contexts: {x: /}}", "build.additional_contexts"),
        ("build: {context: ., network: host}", "build.network"),
        ("env_file: /etc/passwd", "env_file (/etc/passwd)"),
        ("env_file: [$A_VARIABLE_OF_THE_TASK]", "env_file ($A_VARIABLE_OF_THE_TASK)"),
        ("extends: {file: '${A_VARIABLE}', service: y}", "extends.file"),
        ("extends: {file: ../../x.yaml, service: y}", "extends.file"),
        ("logging: {driver: syslog}", "logging.driver"),
        ("external_links: [x]", "external_links"),
        ("runtime: sysbox", "runtime"),
        ("build: {context: ., tags: ['python:3.12-slim']}", "build.tags"),
        ("use_api_socket: true", "use_api_socket"),
        (
            "deploy: {resources: {reservations: {devices: [{driver: cdi, device_ids: [a]}]}}}",
            "deploy.resources.reservations.devices",
        ),
    ],
)
def test_service_options_that_escape_are_refused(tmp_path: Path, line: str, key: str) -> None:
    (tmp_path / "out").symlink_to("/etc")
    assert refused(tmp_path, f"services:\n  web:\n    {line}\n") == f"services.web.{key}"


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("include: [other.yaml]", "include"),
        ("networks: {a: {external: true}}", "networks.a.external"),
        ("networks: {a: {driver: macvlan}}", "networks.a.driver"),
        ("networks: {a: {ipam: {config: [{subnet: 172.20.0.0/16}, {subnet: 8.8.8.0/24}]}}}", "networks.a.ipam"),
        ("networks: {a: {ipam: {driver: mine}}}", "networks.a.ipam"),
        ("networks: {a: {driver_opts: {bridge.name: docker0}}}", "networks.a.driver_opts.bridge.name"),
        ("volumes: {a: {driver_opts: {type: none, o: bind, device: /}}}", "volumes.a.driver_opts"),
        ("volumes: {a: {external: true}}", "volumes.a.external"),
        ("secrets: {a: {file: /etc/shadow}}", "secrets.a.file"),
        ("configs: {a: {external: true}}", "configs.a.external"),
    ],
)
def test_top_level_sections_that_escape_are_refused(tmp_path: Path, table: str, key: str) -> None:
    assert refused(tmp_path, f"{table}\nservices: {{web: }}\n") == key


@pytest.mark.parametrize("line", ["env_file: /etc/passwd", "volumes: ['/etc:/x:ro']", "privileged: true"])
def test_policy_applies_to_extended_files(tmp_path: Path, line: str) -> None:
    (tmp_path / "own.yaml").write_text("services:\n  web:\n    extends: {file: sub/other.yaml, service: web}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.yaml").write_text(f"services:\n  web:\n    {line}\n")
    text = "services:\n  main:\n    extends: {file: own.yaml, service: web}\n"
    assert refused(tmp_path, text).startswith(f"services.web.{line.partition(':')[0]}")


def test_harmless_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("services: {web: {extends: {file: own.yaml, service: other}}, other: }")
    text = """
x-mine: {privileged: true}
services:
  web:
    privileged: false
    cap_add: []
    cap_drop: [ALL]
    network_mode: service:db
    ipc: shareable
    security_opt: [no-new-privileges:true]
    build: {context: ./web, dockerfile: ../Dockerfile, args: {A: b}}
    volumes: [data:/data, /anonymous, ./web:/web:ro, "${ELSEWHERE}:/x:ro", {type: tmpfs, target: /t}]
    env_file: [own.env, {path: other.env, required: false}]
    extends: {file: own.yaml, service: web}
    logging: {driver: json-file}
    deploy: {replicas: 2, resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}
    x-mine: 1
  db: {image: db, secrets: [word]}
volumes: {data: {driver: local, labels: {a: b}}}
networks:
  default: {driver: bridge, internal: true, driver_opts: {com.docker.network.driver.mtu: 1400}}
  inner: {ipam: {driver: default, config: [{subnet: 10.5.0.0/16, gateway: 10.5.0.1}, {subnet: "fd00:1::/64"}, {}]}}
secrets: {word: {file: ./word}}
"""
    assert refused(tmp_path, text) == ""


excess = partial(refused, after="limits of this run: ", before=". Increase these options")
"""Returns what is too much; empty when nothing is."""
CONTAINERS = "(at most 4: container.compose_max_containers)"
PIDS = "from 1 to 100: container.pids_limit)"
MEMORY = "at most 512 MiB: container.compose_max_memory_mb)"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("scale: 4", f"5 containers in total, 4 of them for services.web {CONTAINERS}"),
        ("deploy: {replicas: '10000'}", f"10001 containers in total, 10000 of them for services.web {CONTAINERS}"),
        ("{scale: 1, deploy: {replicas: 9}}", f"10 containers in total, 9 of them for services.web {CONTAINERS}"),
        ("scale: -1", f"inf containers in total, inf of them for services.web {CONTAINERS}"),
        ("pids_limit: -1", f"services.web.pids_limit (-1, {PIDS}"),
        ("pids_limit: 0", f"services.web.pids_limit (0, {PIDS}"),
        ("pids_limit: 101", f"services.web.pids_limit (101, {PIDS}"),
        ("deploy: {resources: {limits: {pids: 1000}}}", f"services.web.deploy.resources.limits.pids (1000, {PIDS}"),
        ("mem_limit: 513m", f"services.web.mem_limit ('513m', {MEMORY}"),
        ("mem_limit: 0.6Gb", f"services.web.mem_limit ('0.6Gb', {MEMORY}"),
        ("mem_limit: 0", f"services.web.mem_limit (0, which means no limit, {MEMORY}"),
        ("mem_limit: 0b", f"services.web.mem_limit ('0b', which means no limit, {MEMORY}"),
        (
            "deploy: {resources: {limits: {memory: '0'}}}",
            f"services.web.deploy.resources.limits.memory ('0', which means no limit, {MEMORY}",
        ),
        ("mem_limit: all", f"services.web.mem_limit ('all', {MEMORY}"),
        ("mem_limit: " + "9" * 40, f"services.web.mem_limit ({'9' * 40}, {MEMORY}"),
        ("memswap_limit: -1", f"services.web.memswap_limit (-1, {MEMORY}"),
        ("mem_reservation: 2g", f"services.web.mem_reservation ('2g', {MEMORY}"),
        ("deploy: {resources: {limits: {memory: 1G}}}", f"services.web.deploy.resources.limits.memory ('1G', {MEMORY}"),
        (
            "deploy: {resources: {reservations: {memory: 1G}}}",
            f"services.web.deploy.resources.reservations.memory ('1G', {MEMORY}",
        ),
    ],
)
def test_excess_resources_of_a_service_are_refused(tmp_path: Path, line: str, told: str) -> None:
    service = line if line.startswith("{") else f"\n    {line}"
    assert excess(tmp_path, f"services:\n  main:\n  web: {service}\n") == told


def test_excess_services_and_networks_are_refused(tmp_path: Path) -> None:
    services = "services: {a: , b: , c: {scale: 0}, d: {profiles: [x]}, e: }"
    assert excess(tmp_path, services) == ""
    assert excess(tmp_path, services.replace("{scale: 0}", "")) == f"5 containers in total {CONTAINERS}"
    networks = ", ".join(f"{name}: " for name in "vwxyz")
    assert excess(tmp_path, f"{services}\nnetworks: {{{networks}}}") == f"5 networks {CONTAINERS}"


def test_bounded_or_unresolved_limits_are_accepted(tmp_path: Path) -> None:
    text = """
services:
  main: {mem_limit: 64g, memswap_limit: -1, pids_limit: 100}
  web:
    scale: 2
    mem_limit: 512MiB
    memswap_limit: "536870912"
    mem_reservation: ${MEMORY:-64g}
    pids_limit: 1
    deploy: {replicas: "${MANY}", resources: {limits: {memory: 0.5g, cpus: "99"}, reservations: }}
"""
    assert excess(tmp_path, text) == ""


@pytest.mark.parametrize(
    "text",
    [
        *("", "services: 1", "services: {a: 1}", "a: [", "services: {a: {volumes: 1}}"),
        *("services: {a: {build: 1}}", "services: {a: {deploy: {resources: {limits: 1}}}}"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match=r"docker-compose\.yaml: .* ?compose file"):
        refused(tmp_path, text)


def test_variables_read_by_programs_are_not_substituted(tmp_path: Path) -> None:
    env = {"PYTHONPATH": "x", "GOAL": "x", "LD_PRELOAD": "x", "no_proxy": "x", "PATHS": "x"}
    asked = spec(
        tmp_path, "services: {a: {image: '${PYTHONPATH}$GOAL${no_proxy:-}${PATHS}', command: LD_PRELOAD}}", env=env
    )
    with pytest.raises(UnsupportedTaskError, match=r"programs on this machine: PYTHONPATH, no_proxy\."):
        check_file(asked, options(compose_trusted=True))
    passed = variables(asked, "unix:///x")
    assert {name: passed.get(name) for name in env} == {
        "PYTHONPATH": None, "GOAL": "x", "LD_PRELOAD": None, "no_proxy": None, "PATHS": "x",
    }  # fmt: skip


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with programs."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def spec(folder: Path, text: str = "services: {}", **asked: Any) -> ContainerSpec:
    (folder / "docker-compose.yaml").write_text(text)
    return ContainerSpec(**{"name": "t", "docker_image": "x", "compose_file": folder / "docker-compose.yaml"} | asked)


def test_compose_command_is_found(tmp_path: Path, tools: Path) -> None:
    check = DockerContainerFactory().check
    with pytest.raises(
        UnsupportedTaskError, match=r"Task t has several services .*neither `docker compose` nor .*Install"
    ):
        check(spec(tmp_path))
    program(tools / "docker", 'echo "docker: unknown command: docker compose" >&2; exit 1')
    program(tools / "docker-compose", "echo 1.25.0")
    with pytest.raises(UnsupportedTaskError, match=r"1\.28 or later is .*docker-compose has version 1\.25\.0"):
        check(spec(tmp_path))
    program(tools / "docker", '[ "$*" = "compose version --short" ] && echo v2.26.1-4')
    assert find_compose().command == (str(tools / "docker"), "compose")
    assert check(spec(tmp_path)) == []


def test_unsupported_options_are_refused_before_the_start(tmp_path: Path, tools: Path) -> None:
    program(tools / "docker-compose", "echo 1.29.2")
    danger = spec(tmp_path, "services: {a: {privileged: true}}")
    with pytest.raises(UnsupportedTaskError, match=r"services\.a\.privileged.*container\.compose_trusted=true"):
        DockerContainerFactory().check(danger)
    assert DockerContainerFactory(compose_trusted=True).check(danger) == []
    large = spec(tmp_path, "services: {a: {scale: 17, mem_limit: 9g, ports: ['80:80']}}")
    told = r"exceeds limits.*18 containers.*compose_max_containers.*; services\.a\.mem_limit .*compose_max_memory_mb"
    with pytest.raises(UnsupportedTaskError, match=told):
        DockerContainerFactory().check(large)
    [warning] = DockerContainerFactory(compose_max_containers=18, compose_max_memory_mb=9 * 1024).check(large)
    assert warning.startswith("ports are not published")
    assert "(docker-compose.yaml: services a)" in warning
    assert DockerContainerFactory(compose_trusted=True).check(large) == [warning]
    mixed = spec(tmp_path, network=PUBLIC, phase_networks=frozenset({NO_NETWORK}))
    with pytest.raises(UnsupportedTaskError, match="a public network in one phase and a closed network in another"):
        DockerContainerFactory().check(mixed)
    assert DockerContainerFactory(network="no-network").check(mixed) == []


def completed(
    services: dict[str, Any],
    asked: ContainerSpec | None = None,
    others: dict[str, Any] | None = None,
    can: Capabilities | None = None,
    **changed: Any,
) -> dict[str, Any]:
    document = {"services": {"main": {}} | services, **(others or {})}
    images = dict.fromkeys(document["services"], "i")
    chosen = options(**{"compose_trusted": True} | changed)
    return complete(document, asked or ContainerSpec("t"), chosen, images, can or Capabilities(cpus=2))


def test_resources_get_labels_and_generated_names() -> None:
    mine = owner_labels()
    web = {"container_name": "w", "ports": ["80:80"], "labels": ["a=b"], "build": "."}
    whole = completed(
        {"web": web}, others={"volumes": {"v": {"name": "n"}, "x": {"external": True}}, "networks": {"n": None}}
    )
    assert whole["services"]["web"] == {
        "image": "i", "labels": {"a": "b", **mine}, "networks": {"default": {"aliases": ["w"]}}, "pids_limit": 100,
    }  # fmt: skip
    assert whole["volumes"] == {"v": {"labels": mine}, "x": {"external": True}}
    assert whole["networks"] == {"default": {"labels": mine}, "n": {"labels": mine}}


def test_file_limits_take_precedence() -> None:
    asked = ContainerSpec("t", cpus=8, memory_mb=64)
    assert {"cpus": 2, "mem_limit": "67108864b"}.items() <= completed({}, asked)["services"]["main"].items()
    limits = {"cpus": "0.5", "memory": "1G", "pids": 7}
    main = completed({"main": {"deploy": {"resources": {"limits": limits}}}}, asked)["services"]["main"]
    assert (main["cpus"], main["mem_limit"], main["pids_limit"], main["deploy"]) == (0.5, "1G", 7, {"resources": {}})
    assert "memswap_limit" not in main


def test_services_without_limits_get_ours() -> None:
    services = {"free": {}, "own": {"deploy": {"resources": {"limits": {"memory": "1G"}}}}}
    asked = ContainerSpec("t", memory_mb=64)
    whole = completed(services, asked, compose_trusted=False, compose_max_memory_mb=2, swap_mb=1)["services"]
    limits = {name: (one["mem_limit"], one.get("memswap_limit")) for name, one in whole.items()}
    assert limits == {"main": ("67108864b", "68157440b"), "free": ("2097152b", "3145728b"), "own": ("1G", None)}
    assert "mem_limit" not in completed(services, compose_trusted=False)["services"]["main"]


def test_factory_options_are_applied() -> None:
    asked = ContainerSpec("t", env={"A": "$1"})
    main = completed({"main": {"environment": ["A=2", "B=3", "HOST"]}}, asked, env={"B": "4", "C": "$5"})["services"][
        "main"
    ]
    assert main["environment"] == {"A": "$$1", "B": "3", "C": "$$5"}
    hosts = completed(
        {"a": {"extra_hosts": {"x": "1"}}, "b": {"network_mode": "none"}},
        network=NetworkOptions(extra_hosts={"y": "2"}),
        no_new_privileges=True,
    )
    assert hosts["services"]["a"]["extra_hosts"] == ["x:1", "y:2"]
    assert "extra_hosts" not in hosts["services"]["b"]
    assert hosts["services"]["a"]["security_opt"] == ["no-new-privileges:true"]


def test_gpus_are_reserved() -> None:
    can = Capabilities(nvidia_runtime=True)
    main = completed({}, ContainerSpec("t", gpus=2), can=can)["services"]["main"]
    assert main["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "capabilities": ["gpu"], "count": 2}
    ]


@pytest.mark.parametrize("services", [{"main": {"scale": 2}}, {"main": {"deploy": {"replicas": 0}}}])
def test_main_must_be_one_container(services: dict[str, Any]) -> None:
    with pytest.raises(ContainerStartError, match="expected exactly one container for the service `main`"):
        completed(services)


def test_main_uses_the_given_base(tmp_path: Path) -> None:
    image = base_document(ContainerSpec("t", docker_image="a$b", context_dir=tmp_path))["services"]["main"]
    assert (image["image"], "build" in image) == ("a$$b", False)
    assert base_document(ContainerSpec("t", context_dir=tmp_path))["services"]["main"].keys() == {"command"}
    (tmp_path / "Dockerfile").touch()
    assert base_document(ContainerSpec("t", context_dir=tmp_path))["services"]["main"]["build"] == {
        "context": str(tmp_path)
    }
