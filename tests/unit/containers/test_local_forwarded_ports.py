"""Forwarded ports of local containers, and their mounts. Runs as root and as an ordinary user."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec, Mount
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.forwarded_port import FORWARDED_PORT
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.network_policy import PUBLIC
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract, greet
from tests.killed_forwarded_port import killed_forwarded_port
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = needs_local


class TestLocalForwardedPorts(ForwardedPortContract):
    networks = frozenset({"no-network"})

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return LocalContainerFactory()


async def test_the_port_is_any_on_the_loopback_of_the_host() -> None:
    spec, forwarded_ports = ContainerSpec("t", network=PUBLIC), ForwardedPortContract()
    async with LocalContainerFactory(network="public")(spec) as box, forwarded_ports.opened(box) as (port, _):
        assert port != FORWARDED_PORT
        assert await forwarded_ports.run(box, greet(port)) == "hello\n"
        async with forwarded_ports.opened(box) as (other, _):
            assert other != port


async def test_mounts_are_read_only_and_no_part_of_the_changes(tmp_path: Path) -> None:
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
async def test_the_forwarded_port_of_a_killed_process_is_closed() -> None:
    async with killed_forwarded_port("local", {}) as forwarded_port:
        assert await asyncio.to_thread(forwarded_port.is_gone)
