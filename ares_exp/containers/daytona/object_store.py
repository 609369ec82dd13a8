"""Whether the service takes files for its image builder: not every deployment has an object store."""

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
    """Asks the service.

    Raises:
        ContainerServiceError: It refused for another reason than that there is none, or did not answer. That is no
            answer: of the same Dockerfile, a sandbox with an object store has another base than one without.
    """
    # The SDK asks this only in the middle of a creation, and has no public call for it.
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
    except ContainerNotFoundError:  # nor does the service know the question
        return False
