"""The service's object store for files of image builds, which not every deployment has."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import ContainerNotFoundError

if TYPE_CHECKING:
    from daytona import AsyncDaytona

_ASK_SEC = 15.0
_NONE = "not configured"  # as the service says it (`object-storage.service.ts` of daytonaio/daytona)


async def has_object_store(service: DaytonaService) -> bool:
    """Asks the service whether it has an object store.

    Raises:
        ContainerServiceError: It did not answer, or refused for another reason. The answer must be certain: the same
            Dockerfile has another base with an object store than without.
    """
    # The SDK asks this only during a creation, and has no public call for it.
    from daytona import DaytonaError
    from daytona._utils.errors import intercept_errors

    @intercept_errors()
    async def request(client: AsyncDaytona) -> None:
        await client._object_storage_api.get_push_access(_request_timeout=_ASK_SEC)

    async def ask(client: AsyncDaytona) -> bool:
        try:
            await request(client)
        except DaytonaError as error:
            if error.status_code == HTTPStatus.SERVICE_UNAVAILABLE and _NONE in error.message.lower():
                return False
            raise
        return True

    try:
        return await service.call("The object store", ask, timeout_sec=2 * _ASK_SEC)
    except ContainerNotFoundError:  # an older service without this call
        return False
