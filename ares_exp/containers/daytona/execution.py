"""Execution of one command in a sandbox by one request; used by the relay and the start."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ares_exp.containers.daytona.relay_script import MAX_ANSWER_BYTES
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import ContainerServiceError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

KILLED = -1
"""The exit code of a command that the service killed at its time limit."""

_LATE_SEC = 10.0  # tolerance beyond the time limit in a loaded sandbox
_OUTAGE_SEC = 120.0  # bound on an outage of the service before a sandbox is given up


async def execute(
    service: DaytonaService, sandbox: AsyncSandbox, command: str, seconds: float, *, outage_sec: float = _OUTAGE_SEC
) -> tuple[int, str]:
    """Runs a command as the sandbox's user. It may run twice if an answer gets lost.

    The SDK's `process.exec` reads answers of any size, and programs in the sandbox decide their size.

    Args:
        service: The sandbox's service.
        sandbox: The sandbox.
        command: At most 128 KiB, reads no stdin, leaves no process that holds its stdout.
        seconds: Time limit.
        outage_sec: Additional time for retries while the service cannot be reached.

    Returns:
        Its exit code (`KILLED`: it took too long) and its output, stderr included, with invalid UTF-8 replaced.

    Raises:
        ContainerServiceError: The service refused, or did not answer; its answer was malformed or too large.
        ContainerDiedError: The sandbox is gone.
    """
    from daytona import DaytonaProcessExecutionTimeoutError

    limit = math.ceil(seconds + _LATE_SEC)

    async def send(_: AsyncDaytona) -> tuple[int, str]:
        try:
            return await _send(sandbox, command, limit)
        except DaytonaProcessExecutionTimeoutError:
            return KILLED, ""

    return await service.call(
        f"A command in sandbox {sandbox.name}", send, timeout_sec=limit + _LATE_SEC + outage_sec, repeatable=True
    )


async def _send(sandbox: AsyncSandbox, command: str, limit: int) -> tuple[int, str]:
    # The SDK has no public way to get an unread answer, or to translate its errors.
    from daytona._utils.errors import intercept_errors
    from daytona_toolbox_api_client_async import ExecuteRequest
    from daytona_toolbox_api_client_async.exceptions import ApiException

    @intercept_errors()
    async def request() -> bytes:
        answer: Any = await sandbox.process._api_client.execute_command_without_preload_content(
            request=ExecuteRequest(command=command, timeout=limit), _request_timeout=limit + _LATE_SEC
        )
        body = bytearray()
        async with answer:
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    answer.close()
                    break
        if answer.status != HTTPStatus.OK:
            raise ApiException(http_resp=answer, body=body.decode("utf-8", "replace"))
        return bytes(body)

    body = await request()
    if len(body) > MAX_ANSWER_BYTES:
        raise ContainerServiceError(
            f"Sandbox {sandbox.name} printed more than {MAX_ANSWER_BYTES} bytes where a few were asked for: something "
            "in it has taken the place of its programs."
        )
    try:
        found = json.loads(body)
        return int(found["exitCode"]), str(found.get("result") or "")
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ContainerServiceError(
            f"Expected an exit code and an output from sandbox {sandbox.name}, got {body[:200]!r}."
        ) from error
