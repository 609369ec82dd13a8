"""Whether there is an object store decides what a sandbox is made from, so a service that fails does not answer it."""

from __future__ import annotations

import pytest

from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.containers.images.object_store import has_object_store
from ares_exp.errors import ContainerServiceUnavailableError
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once]

ACCESS = dict.fromkeys(
    ("accessKey", "secret", "sessionToken", "storageUrl", "organizationId", "bucket", "region"), "some"
)


async def test_none_is_configured_or_known(emulator: Emulator, service: DaytonaService) -> None:
    assert not await has_object_store(service)
    emulator.faults.add(Fault("status", path="/push-access$", status=404))
    assert not await has_object_store(service)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_an_outage_is_waited_out(emulator: Emulator, service: DaytonaService, status: int) -> None:
    emulator.faults.add(Fault("status", path="/push-access$", status=status))
    emulator.faults.add(Fault("status", path="/push-access$", status=200, body=ACCESS))
    assert await has_object_store(service)


async def test_a_service_that_does_not_say(emulator: Emulator, service: DaytonaService) -> None:
    emulator.faults.add(Fault("status", path="/push-access$", status=500, times=None))
    with pytest.raises(ContainerServiceUnavailableError, match=r"The object store: .* answers 500"):
        await has_object_store(service)
