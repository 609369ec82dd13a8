"""Whether the service takes files for its image builder: not every deployment has an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import ContainerNotFoundError, ContainerServiceUnavailableError

if TYPE_CHECKING:
    from daytona import AsyncDaytona

_ASK_SEC = 15.0


async def has_object_store(service: DaytonaService) -> bool:
    """Asks the service.

    Raises:
        ContainerServiceError: It refused for another reason than that there is none: the key, too many requests.
    """
    # The SDK asks this only in the middle of a creation, and has no public call for it.
    from daytona._utils.errors import intercept_errors

    @intercept_errors()
    async def ask(client: AsyncDaytona) -> None:
        await client._object_storage_api.get_push_access(_request_timeout=_ASK_SEC)

    try:
        await service.call("The object store", ask, timeout_sec=2 * _ASK_SEC, repeatable=False)
    except (ContainerNotFoundError, ContainerServiceUnavailableError):
        return False
    return True
