"""Forwarded ports of local containers, their mounts, and their relays in Python and JavaScript."""

import asyncio
import shlex
import shutil
from importlib import resources
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec, Mount
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.forwarded_port import _RUN, FORWARDED_PORT, ForwardedPort, Serve, open_relayed_port
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.local.container_files import SEARCH_PATH
from ares_exp.containers.local.fifo_stream import FifoStream
from ares_exp.containers.network_policy import PUBLIC
from ares_exp.errors import PortForwardingError
from ares_exp.testing.forwarded_port_contract import (
    ForwardedPortContract,
    RelayedForwardedPortContract,
    Server,
    echo,
    greet,
)
from tests.closed_port import closed_port
from tests.killed_forwarded_port import killed_forwarded_port
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = needs_local


class RelayContract(RelayedForwardedPortContract):
    """The same over a relay, of which an image has one interpreter."""

    networks = frozenset({"no-network"})
    interpreter = ""

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return LocalContainerFactory()

    async def open(self, box: Container, serve: Serve, port: int = FORWARDED_PORT) -> ForwardedPort:
        assert isinstance(box, LocalContainer)
        return await box._forwarded_ports.open(
            lambda: open_relayed_port(lambda: only(box, self.interpreter), serve, port)
        )


class TestPythonRelay(RelayContract):
    interpreter = "python3"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("node", path=SEARCH_PATH) is None, reason="this machine has no node")
class TestNodeRelay(RelayContract):
    interpreter = "node"


async def only(box: LocalContainer, program: str) -> FifoStream:
    """A shell that finds no other program."""
    await box.exec(f"mkdir -p /tmp/only && ln -sf $(readlink -f $(command -v {program})) /tmp/only/{program}")
    stream = await box._open_shell("root")
    await stream.write(b"PATH=/tmp/only\n")
    return stream


async def test_relay_needs_an_interpreter() -> None:
    async with local_container() as box:
        with pytest.raises(PortForwardingError, match=r"neither python3 nor perl nor node.*perl-base"):
            await open_relayed_port(lambda: only(box, "true"), Server(echo), FORWARDED_PORT)


@pytest.mark.parametrize("program", ["python3", "perl", "node"])
async def test_relay_ends_without_a_peer(program: str) -> None:
    """Its stdin stays open, as in a sandbox whose owner was killed."""
    if (path := shutil.which(program, path=SEARCH_PATH)) is None:
        pytest.skip(f"this machine has no {program}")
    name, command = _RUN[program]
    source = resources.files("ares_exp.containers").joinpath(name).read_text()
    with closed_port() as port:
        pass
    words = shlex.split(command.format(source=shlex.quote(source), lease=1, ports=port))
    relay = await asyncio.create_subprocess_exec(path, *words[2:], stdin=asyncio.subprocess.PIPE, stdout=-1)
    assert relay.stdout is not None
    async with asyncio.timeout(60):
        assert (await relay.stdout.readline()).startswith(b"port ")
        assert await relay.stdout.read() == bytes(8)  # this was why
        await relay.wait()


@pytest.mark.parametrize("program", ["python3", "node"])
async def test_relay_runs_while_a_peer_is_connected(program: str) -> None:
    if shutil.which(program, path=SEARCH_PATH) is None:
        pytest.skip(f"this machine has no {program}")
    async with local_container() as box:
        forwarded_port = await open_relayed_port(lambda: only(box, program), Server(echo), FORWARDED_PORT, lease_sec=1)
        lost = asyncio.create_task(forwarded_port.lost())
        await asyncio.wait({lost}, timeout=2)
        assert not lost.done()
        assert forwarded_port._relay.port == FORWARDED_PORT
        await forwarded_port.close()
        await lost


FORGED = """
case "$*" in *socket,*struct*) exit 0;; esac
echo 'port 61081'
FRAMES
exec sleep 60
"""


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (r"printf '\0\0\0\1\0\1\0\0'", "it sent a frame of 65536 bytes"),
        (r"printf '\0\0\0\1\377\377\377\377\0\0\0\1\377\377\377\377'", "it accepted connection 1, which is open"),
        (
            r"printf '\0\0\0\1\377\377\377\377'; for i in $(seq 64); do printf '\0\0\0\1\0\0\200\0'; "
            "head -c 32768 /dev/zero; done",
            "it sent more data on a connection than allowed",
        ),
    ],
    ids=["large", "twice", "more than its credit"],
)
async def test_forged_relay_is_refused(frames: str, why: str) -> None:
    async def forged() -> FifoStream:
        stream = await box._open_shell("root")
        await stream.write(b"PATH=/tmp/forged:$PATH\n")
        return stream

    async def nobody_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with local_container() as box:
        script = "#!/bin/sh\n" + FORGED.replace("FRAMES", frames)
        make = 'mkdir /tmp/forged; printf %s "$IT" >/tmp/forged/python3; chmod +x /tmp/forged/*'
        await box.exec(make, env={"IT": script})
        server = Server(nobody_reads)
        forwarded_port = await open_relayed_port(forged, server, FORWARDED_PORT)
        async with asyncio.timeout(60):
            assert why in await forwarded_port.lost()
        await forwarded_port.close()
        await server.close()


class TestLocalForwardedPorts(ForwardedPortContract):
    networks = frozenset({"no-network"})

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return LocalContainerFactory()


async def test_port_is_any_on_host_loopback() -> None:
    spec, forwarded_ports = ContainerSpec("t", network=PUBLIC), ForwardedPortContract()
    async with LocalContainerFactory(network="public")(spec) as box, forwarded_ports.opened(box) as (port, _):
        assert port != FORWARDED_PORT
        assert await forwarded_ports.run(box, greet(port)) == "hello\n"
        async with forwarded_ports.opened(box) as (other, _):
            assert other != port


async def test_mounts_are_read_only_and_not_captured(tmp_path: Path) -> None:
    objects = ObjectStore(tmp_path / "objects")
    shown = tmp_path / "tool"
    (shown / "bin").mkdir(parents=True)
    (shown / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (shown / "bin" / "run").chmod(0o755)
    mounts = (Mount(shown, "/opt/ares_exp/tool", "d1"),)
    async with local_container(mounts=mounts) as box:
        assert (await box.exec("/opt/ares_exp/tool/bin/run")).output == "ran\n"
        written = await box.exec("touch /opt/ares_exp/tool/x; rm -r /opt/ares_exp/tool; echo mine >/opt/file")
        assert "Read-only file system" in written.output
        delta = await box.capture_changes(objects)
    assert [path for path, entry in delta.entries.items() if entry.kind == "file"] == ["/opt/file"]
    assert not any(path.startswith("/opt/ares_exp") for path in delta.entries)
    assert (shown / "bin" / "run").exists()
    changes = StoredChanges(delta, objects)
    for wanted, seen in ((mounts, "ran\nmine\n"), ((), "mine\n")):
        async with local_container(mounts=wanted, changes=changes) as box:
            assert (await box.exec("/opt/ares_exp/tool/bin/run 2>/dev/null; cat /opt/file")).output == seen


@pytest.mark.root
async def test_killed_process_closes_its_forwarded_port() -> None:
    async with killed_forwarded_port("local", {}) as forwarded_port:
        assert await asyncio.to_thread(forwarded_port.is_gone)
