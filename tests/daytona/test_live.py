"""The same suites against the real service. They make some hundred sandboxes there, which costs money.

    ARES_EXP_LIVE_DAYTONA=1 DAYTONA_API_KEY=… pytest tests/daytona/test_live.py

Without the first variable they are skipped, so that no other run of the tests ever costs anything, whatever keys are in
its environment. `DAYTONA_API_URL` and `DAYTONA_TARGET` say where, as for a run; `ARES_EXP_LIVE_IMAGE` names another
image than `debian:12.9`.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec, SnapshottableContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory, find
from ares_exp.containers.daytona.provider_snapshot import delete_kept
from ares_exp.containers.daytona.service import Credentials, DaytonaService, has_credentials
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.containers.ownership import describe, owner_labels
from ares_exp.testing.container_contract import ContainerContract

OPT_IN = "ARES_EXP_LIVE_DAYTONA"
IMAGE = os.environ.get("ARES_EXP_LIVE_IMAGE", "debian:12.9")
SPEC = ContainerSpec("live", docker_image=IMAGE, env={"FROM_SPEC": "spec", "BOTH": "spec"}, lifetime_sec=600)
REACH = "timeout 10 bash -c 'exec 3<>/dev/tcp/{}' 2>/dev/null && echo reached || echo cut off"

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

if not os.environ.get(OPT_IN) or not has_credentials():
    pytest.skip(
        f"sandboxes of the real service cost money: only with {OPT_IN}=1 and DAYTONA_API_KEY", allow_module_level=True
    )


async def ours() -> list[str]:
    """The sandboxes that this process has at the service."""
    service = DaytonaService(Credentials.from_environment())
    try:
        found = await find(service, of_this_machine=True)
    finally:
        await service.close()
    return sorted(one.name for one in found if one.whose == describe(owner_labels()))


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert asyncio.run(ours()) == []


@pytest.fixture
def factory() -> ContainerFactory:
    return DaytonaContainerFactory()


class TestLiveContainer(ContainerContract):
    networks = frozenset({"no-network"})  # this machine cannot be reached from there: see below

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DaytonaContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return SPEC


async def test_networks_follow_the_policy(factory: ContainerFactory) -> None:
    allowed = NetworkPolicy("allowlist", frozenset({"1.1.1.1/32"}))
    policies = {NO_NETWORK: (False, False), PUBLIC: (True, True), allowed: (True, False)}
    spec = ContainerSpec("live", docker_image=IMAGE, network=NO_NETWORK, phase_networks=frozenset(policies))

    async def reached(box: Container, where: str) -> bool:
        return (await box.exec(REACH.format(where), timeout_sec=60)).output == "reached\n"

    async with factory(spec) as box:
        for policy, expected in [*policies.items(), *policies.items()]:
            await box.set_network(policy)
            assert (await reached(box, "1.1.1.1/443"), await reached(box, "8.8.8.8/443")) == expected


async def test_dockerfile_with_local_files_is_built(
    factory: ContainerFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the service's object store where it has one."""
    context = tmp_path_factory.mktemp("context")
    (context / "Dockerfile").write_text(
        f"FROM {IMAGE}\nWORKDIR /app\nCOPY data ./\nRUN wc -c <data >size\nUSER nobody\n"
    )
    (context / "data").write_text("data\n")
    async with factory(ContainerSpec("live", context_dir=context)) as box:
        assert (await box.exec("pwd; id -un; cat data size")).output == "/app\nnobody\ndata\n5\n"


async def test_snapshot_starts_another_sandbox(
    factory: ContainerFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objects = ObjectStore(tmp_path_factory.mktemp("objects"))
    async with factory(SPEC) as box:
        await box.exec("echo kept >/kept; rm /etc/motd")
        assert isinstance(box, SnapshottableContainer)
        delta = await box.capture_changes(objects)
    async with factory(replace(SPEC, changes=StoredChanges(delta, objects))) as box:
        assert (await box.exec("cat /kept; ls /etc/motd 2>&1 | grep -c cannot")).output == "kept\n1\n"
    service = DaytonaService(Credentials.from_environment())
    try:
        await delete_kept(service, delta.base.rpartition("=")[2])
    finally:
        await service.close()
