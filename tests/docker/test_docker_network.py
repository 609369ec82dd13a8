"""Network policies on a real engine, with real sockets. Hosts of the tests are servers of this machine."""

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.network import PROXY_ADDRESS
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.errors import ContainerDiedError, UnsupportedTaskError
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.harbor_task import load_task
from ares_exp.testing.host_server import hello_server
from tests.compatibility.case import write_task

pytestmark = [pytest.mark.docker, pytest.mark.once]

IMAGE = "python:3.12-slim"
Server = tuple[str, int]

# A bridge whose own address is not fixed loses connections for seconds when other containers come and go.
PATIENCE_SEC = 60


def spec(network: NetworkPolicy, *phases: NetworkPolicy) -> ContainerSpec:
    return ContainerSpec("network", docker_image=IMAGE, network=network, phase_networks=frozenset(phases))


def allowing(*hosts: str) -> NetworkPolicy:
    return NetworkPolicy("allowlist", frozenset(hosts))


async def fetch(box: Container, host: str, port: int, *, env: dict[str, str] | None = None) -> str:
    """What Python's own HTTP client, which follows the proxy variables, prints."""
    code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).read().decode())"
    command = f'python3 -c "{code}" http://{host}:{port}/ 2>&1 | grep . | tail -1'
    return (await box.exec(command, env=env, timeout_sec=2 * PATIENCE_SEC)).output.strip()


async def dial(box: Container, host: str, port: int) -> str:
    """What a socket that knows of no proxy gets."""
    ask = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && timeout {PATIENCE_SEC} cat <&3"
    command = f"exec 3<>/dev/tcp/{host}/{port} && {ask}"
    return (await box.exec(f"{{ {command}; }} 2>&1 | tail -1", timeout_sec=2 * PATIENCE_SEC)).output.strip()


async def interfaces(box: Container) -> set[str]:
    return set((await box.exec("ls /sys/class/net")).output.split()) - {"lo"}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with hello_server() as server:
        yield server


async def test_factory_can_disable_the_network(server: Server) -> None:
    async with DockerContainerFactory(network="no-network")(spec(PUBLIC)) as box:
        assert await interfaces(box) == set()
        assert "Network is unreachable" in await dial(box, *server)


@pytest.mark.parametrize("asked", [pytest.param(NO_NETWORK, marks=pytest.mark.nightly), allowing("a.example")])
async def test_factory_can_enable_the_public_network(asked: NetworkPolicy, server: Server) -> None:
    factory = DockerContainerFactory(network="public", extra_hosts={"example.test": "192.0.2.7"})
    assert factory.check(spec(asked)) == []
    async with factory(spec(asked, PUBLIC)) as box:
        assert await interfaces(box) == {"eth0"}
        assert await dial(box, *server) == "hello"
        assert "proxy" not in (await box.exec("env")).output.lower()
        await box.set_network(asked)
        assert await dial(box, *server) == "hello"
        if asked != NO_NETWORK:
            assert (await box.exec("grep example.test /etc/hosts")).output.split() == ["192.0.2.7", "example.test"]


@pytest.mark.root
async def test_factory_hosts_are_added_to_every_task(server: Server) -> None:
    factory = DockerContainerFactory(allowed_hosts=[f" {server[0]}. "])
    assert factory.check(spec(NO_NETWORK)) == []
    assert factory.check(spec(NO_NETWORK, PUBLIC)) == ["container.allowed_hosts has no effect on a public network"]
    async with factory(spec(NO_NETWORK, PUBLIC)) as box:
        assert await fetch(box, *server) == "hello"
        await box.set_network(PUBLIC)
        assert await dial(box, *server) == "hello"


def test_invalid_host_names_are_rejected() -> None:
    with pytest.raises(ValueError, match="expected a host name"):
        DockerContainerFactory(allowed_hosts=["https://a.example"])


@pytest.mark.root
async def test_allow_list_permits_only_its_hosts(server: Server) -> None:
    async with (
        hello_server("127.0.0.1") as loopback,
        DockerContainerFactory()(spec(allowing(server[0], "127.0.0.1"))) as box,
    ):
        assert await interfaces(box) == set()
        assert await fetch(box, *server) == "hello"
        for refused in ("192.0.2.77", "a.example"):
            assert "403" in await fetch(box, refused, server[1])
        # Around the proxy there is nothing, not even names.
        assert "Network is unreachable" in await dial(box, *server)
        assert (await box.exec("getent hosts a.example")).exit_code != 0
        # And 127.0.0.1 is the container itself, by any way.
        assert "Connection refused" in await fetch(box, *loopback)
        assert "403" in await fetch(box, *loopback, env={"no_proxy": "", "NO_PROXY": ""})
        await box.exec("cd /tmp; echo inside > index.html; python3 -m http.server 8123 >/dev/null 2>&1 &")
        await box.exec("until (: > /dev/tcp/127.0.0.1/8123) 2>/dev/null; do sleep 0.05; done", timeout_sec=60)
        assert (await fetch(box, "localhost", 8123), await fetch(box, "127.0.0.1", 8123)) == ("inside", "inside")


@pytest.mark.root
async def test_extra_hosts_of_the_factory_are_resolved(server: Server, engine: docker.DockerClient) -> None:
    """What this machine's own resolver says is for the tests of the proxy."""
    factory = DockerContainerFactory(extra_hosts={"here.example": server[0], "gateway.example": "host-gateway"})
    subnet = engine.networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"]
    async with (
        hello_server(str(next(ipaddress.ip_network(subnet).hosts()))) as (_, port),
        factory(spec(allowing("here.example", "gateway.example"))) as box,
    ):
        assert await fetch(box, "here.example", server[1]) == "hello"
        assert await fetch(box, "HERE.example.", server[1]) == "hello"
        assert await fetch(box, "gateway.example", port) == "hello"
        assert "403" in await fetch(box, *server)


@pytest.mark.root
async def test_switch_closes_open_connections(server: Server) -> None:
    async def hold(policy: NetworkPolicy, command: str) -> str:
        """Opens a connection under `policy`, switches to no network, and uses the connection."""
        async with DockerContainerFactory()(spec(policy, NO_NETWORK)) as box:
            task = asyncio.create_task(
                box.exec(
                    f"{command}; : > /tmp/open; until [ -e /tmp/go ]; do sleep 0.05; done\n"
                    "printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; timeout 2 cat <&3; echo end",
                    timeout_sec=60,
                )
            )
            await box.exec("until [ -e /tmp/open ]; do sleep 0.05; done", timeout_sec=60)
            await box.set_network(NO_NETWORK)
            await box.exec(": > /tmp/go")
            return (await task).output

    address, port = server
    assert "hello" not in await hold(PUBLIC, f"exec 3<>/dev/tcp/{address}/{port}")
    proxy = "/dev/tcp/{}/{}".format(*PROXY_ADDRESS)
    connect = (
        f"exec 3<>{proxy}; printf 'CONNECT {address}:{port} HTTP/1.1\\r\\n\\r\\n' >&3; read -r a <&3; read -r b <&3"
    )
    said = await hold(allowing(address), f"{connect}; echo $a")
    assert "200 Connection established" in said
    assert "hello" not in said


async def test_switch_of_a_removed_container_fails(engine: docker.DockerClient) -> None:
    async with DockerContainerFactory()(spec(NO_NETWORK, PUBLIC)) as box:
        engine.api.remove_container(box.container_name, force=True)  # type: ignore[attr-defined]
        with pytest.raises(ContainerDiedError):
            await box.set_network(PUBLIC)
    with pytest.raises(ContainerDiedError):
        await box.set_network(PUBLIC)


def internet_sockets() -> int:
    """How many this process has open, in whatever network namespace."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            count += one.family in (socket.AF_INET, socket.AF_INET6)
    return count


@pytest.mark.root
async def test_stop_closes_sockets_and_networks(engine: docker.DockerClient, server: Server) -> None:
    before = internet_sockets()
    async with DockerContainerFactory()(spec(allowing(server[0]))) as box:
        assert await fetch(box, *server) == "hello"
        assert internet_sockets() > before
    assert engine.networks.list(filters={"label": f"ares_exp.pid={os.getpid()}"}) == []
    async with asyncio.timeout(60):
        while internet_sockets() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("asked", [spec(allowing("a.example")), spec(NO_NETWORK, allowing())])
def test_remote_engine_is_refused(monkeypatch: pytest.MonkeyPatch, asked: ContainerSpec) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.77:2375")
    with pytest.raises(
        UnsupportedTaskError, match=r"Task network .* but DOCKER_HOST is tcp://192.0.2.77:2375\. Run ares_exp there"
    ):
        DockerContainerFactory().check(asked)
    assert DockerContainerFactory(network="no-network").check(asked) == []
    assert DockerContainerFactory().check(spec(NO_NETWORK, PUBLIC)) == []


# A whole episode

TASK = """
[environment]
docker_image = "python:3.12-slim"
network_mode = "no-network"
[{phase}]
network_mode = "allowlist"
allowed_hosts = ["{address}"]
"""
ASK = "python3 -c \"import urllib.request as u; print(u.urlopen('http://{}:{}/').read().decode())\" 2>&1 | tail -2"


@pytest.mark.root
@pytest.mark.parametrize("phase", ["agent", "verifier"])
async def test_one_phase_has_a_network(tmp_path: Path, server: Server, phase: str) -> None:
    ask = ASK.format(*server)
    files = {
        "task.toml": TASK.format(phase=phase, address=server[0]),
        "environment/Dockerfile": None,
        "tests/test.sh": f"#!/bin/bash\n{ask}; env | grep -i proxy; echo 1 > /logs/verifier/reward.txt\n",
    }
    env = CodeEnvironment(
        [load_task(write_task(tmp_path / "task", files))],
        container_factory=DockerContainerFactory(),
        code_agent_factory=ShellAgentFactory(),
        output_dir=tmp_path / "out",
    )
    async with env:
        await env.reset()
        step = await env.step(LLMResponse.from_text(f"```bash\n{ask}; env | grep -i proxy\n```"))
        agent = str(step.observation.messages[-1])
        last = await env.step(LLMResponse.from_text("```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"))
    assert last.reward == 1.0
    seen = {"agent": agent, "verifier": (tmp_path / "out" / "verifier" / "test-stdout.txt").read_text()}
    for one, text in seen.items():
        assert ("hello" in text, "HTTPS_PROXY=" in text) == (one == phase, one == phase)
        assert ("Network is unreachable" in text) == (one != phase)


@pytest.mark.root
async def test_containers_under_allow_lists_are_isolated(server: Server) -> None:
    factory = DockerContainerFactory()
    async with factory(spec(allowing(server[0]))) as one, factory(spec(allowing("a.example"))) as two:
        assert await fetch(one, *server) == "hello"
        assert "403" in await fetch(two, *server)
        await one.exec("cd /tmp; python3 -m http.server 8123 --bind 0.0.0.0 >/dev/null 2>&1 &")
        await one.exec("until (: > /dev/tcp/127.0.0.1/8123) 2>/dev/null; do sleep 0.05; done", timeout_sec=60)
        assert "Connection refused" in await dial(two, "127.0.0.1", 8123)
