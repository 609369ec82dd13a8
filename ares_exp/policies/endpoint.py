"""One OpenAI-compatible HTTP endpoint: single tries through the official client, and what their failures mean.

The client's own retries are off: they neither spare an account without credit nor can their waits be configured.
Its transport is aiohttp: the time that the default pool spends on a request grows with the number of parallel ones.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ares_exp.errors import PolicyError, PreflightError
from ares_exp.llms.wire import WireFormatError
from ares_exp.policies.retry import EndpointError, retry_after_sec

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

SHOWN_CHARS = 500
_REMEDIES = {
    401: "Check the key in {key}.",
    403: "Check what the key in {key} is allowed to do.",
    404: "Check policy.model and policy.base_url.",
}
# 429s that no waiting cures.
_OUT_OF_CREDIT = {"insufficient_quota", "billing_hard_limit_reached"}


@dataclass(frozen=True, slots=True)
class _Connection:
    """What is open on one event loop."""

    client: AsyncOpenAI = field(repr=False)
    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore


class Endpoint:
    """One endpoint. Opens its client at the first request, on the event loop that is running then."""

    def __init__(self, *, base_url: str, api_key_env: str | None, max_concurrency: int, max_answer_bytes: int) -> None:
        """Names the endpoint; opens nothing.

        Args:
            base_url: URL up to and with the version, such as `https://api.openai.com/v1`.
            api_key_env: Environment variable that holds the key; `None` for an endpoint that needs none.
            max_concurrency: Bound on requests under way at once.
            max_answer_bytes: Bound on the size of an answer.
        """
        self.base_url = base_url.rstrip("/")
        self._api_key_env = api_key_env
        self._max_concurrency = max_concurrency
        self._max_answer_bytes = max_answer_bytes
        self._connection: _Connection | None = None
        self._secret = ""
        self._headers: dict[str, Any] = {}

    @property
    def slots(self) -> asyncio.Semaphore:
        """Bounds the requests under way at once: hold it while trying."""
        return self._connect().slots

    async def post(self, body: Mapping[str, Any], *, timeout_sec: float) -> Any:
        """One try of `POST {base_url}/chat/completions`. Returns the parsed JSON body of the answer.

        Raises:
            EndpointError: There was no answer with a good status within `timeout_sec`.
            WireFormatError: The answer is not JSON or too large, or `body` cannot be sent.
            PreflightError: The client is not installed, or there is no key.
        """
        client = self._connect().client
        try:
            async with asyncio.timeout(timeout_sec):
                return self._parse(await self._read(client, body))
        except Exception as error:
            failure = self._failure(error, "POST", "chat/completions", timeout_sec)
            if failure is None:
                raise
        # Outside of the handler, so that no chained exception shows what was scrubbed.
        raise failure

    async def check(self, *, timeout_sec: float) -> None:
        """Finds out whether the endpoint can be reached and takes the key, by `GET {base_url}/models`.

        Raises:
            PreflightError: It cannot, or does not; with the remedy.
        """
        client = self._open()
        failure: PolicyError | None = None
        try:
            async with (
                asyncio.timeout(timeout_sec),
                client.models.with_streaming_response.list(extra_headers=self._headers),
            ):
                pass
        except Exception as error:
            failure = self._failure(error, "GET", "models", timeout_sec)
            if failure is None:
                raise
        finally:
            await client.close()
        if not isinstance(failure, EndpointError):
            return
        if failure.status is None:
            raise PreflightError(f"{failure} Check that the server runs and that policy.base_url is right.")
        if failure.status in (401, 403):
            raise PreflightError(str(failure))

    def scrub(self, text: str) -> str:
        """`text` without the key."""
        return text.replace(self._secret, "***") if self._secret else text

    async def close(self) -> None:
        """Closes the connections. Idempotent; a later request opens new ones."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.client.close()

    def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None:
            self._connection = _Connection(self._open(), loop, asyncio.Semaphore(self._max_concurrency))
        if self._connection.loop is not loop:
            raise RuntimeError("This policy has connections on another event loop: await its close() there first.")
        return self._connection

    def _open(self) -> AsyncOpenAI:
        self._secret = key = self._key()
        try:
            from httpx2 import Limits
            from openai import AsyncOpenAI, DefaultAioHttpClient, Omit

            limits = Limits(max_connections=self._max_concurrency, max_keepalive_connections=self._max_concurrency)
            transport = DefaultAioHttpClient(limits=limits, timeout=None)
        except (ImportError, RuntimeError):  # RuntimeError: openai is there, aiohttp is not.
            raise PreflightError(
                "policy=chat_completions needs the official `openai` client: pip install 'ares-exp[openai]'."
            ) from None
        # The client insists on a key; it takes this as "none, on purpose".
        self._headers = {} if key else {"Authorization": Omit()}
        return AsyncOpenAI(
            api_key=key or "none",
            base_url=self.base_url,
            max_retries=0,
            timeout=None,
            http_client=transport,
        )

    def _key(self) -> str:
        key = os.environ.get(self._api_key_env, "").strip() if self._api_key_env else ""
        if self._api_key_env and not key:
            raise PreflightError(
                f"Expected the API key of {self.base_url} in the environment variable {self._api_key_env}, which is "
                f"not set. Run `export {self._api_key_env}=…`, name another variable with policy.api_key_env=…, or set "
                "policy.api_key_env=null if the endpoint needs no key."
            )
        if not (key.isascii() and key.isprintable()):
            raise PreflightError(f"The API key in {self._api_key_env} has characters that no HTTP header can hold.")
        return key

    async def _read(self, client: AsyncOpenAI, body: Mapping[str, Any]) -> bytes:
        # The body goes past the client's own typed arguments: converting messages takes it milliseconds of CPU.
        create = client.chat.completions.with_streaming_response.create
        answer = bytearray()
        async with create(model=body["model"], messages=[], extra_headers=self._headers, extra_body=body) as response:
            async for chunk in response.iter_bytes():
                answer += chunk
                if len(answer) > self._max_answer_bytes:
                    raise WireFormatError(
                        f"Expected an answer of at most {self._max_answer_bytes} bytes from {self.base_url}, got more. "
                        "Raise policy.max_answer_bytes if it is a real one."
                    )
        return bytes(answer)

    def _parse(self, answer: bytes) -> Any:
        with suppress(ValueError, RecursionError):
            return json.loads(answer)
        shown = self._shown(answer[: 4 * SHOWN_CHARS].decode(errors="replace"))
        raise WireFormatError(f"Expected JSON from {self.base_url}/chat/completions, got: {shown!r}")

    def _failure(self, error: Exception, method: str, path: str, timeout_sec: float) -> PolicyError | None:
        """What `error` means; `None` for one that is not the endpoint's."""
        from aiohttp import ClientError
        from httpx2 import HTTPError
        from openai import APIConnectionError, APIStatusError

        request = f"{method} {self.base_url}/{path}"
        if isinstance(error, WireFormatError):
            return error
        if isinstance(error, APIStatusError):
            return self._refusal(error, request)
        if isinstance(error, TimeoutError):
            return EndpointError(f"{request} gave no answer within {timeout_sec:g} s.", retryable=True)
        if isinstance(error, APIConnectionError | HTTPError | ClientError | OSError):
            return EndpointError(f"{request} failed: {self._shown(_innermost(error))}.", retryable=True)
        if isinstance(error, UnicodeEncodeError):
            return WireFormatError(f"The request holds text that is not valid Unicode: {error.reason}.")
        return None

    def _refusal(self, error: APIStatusError, request: str) -> EndpointError:
        status, body = error.status_code, error.body
        message = body.get("message") if isinstance(body, Mapping) else None
        shown = self._shown(str(message or body or error.response.reason_phrase))
        remedy = _REMEDIES.get(status, "").format(key=self._api_key_env or "policy.api_key_env (null now)")
        return EndpointError(
            f"{request} answered {status}: {shown.rstrip('.')}. {remedy}".rstrip(),
            status=status,
            code=error.code,
            retryable=status >= 500 or (status in (408, 409, 429) and error.code not in _OUT_OF_CREDIT),
            retry_after_sec=retry_after_sec(error.response.headers),
        )

    def _shown(self, text: str) -> str:
        text = self.scrub(" ".join(text.split()))
        return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _innermost(error: BaseException) -> str:
    """Type and text of the exception at the bottom: the client's own ones only say "Connection error"."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {error}"
