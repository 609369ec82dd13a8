"""One OpenAI-compatible HTTP endpoint. Each kind of failure has its own error class.

Requests are not retried here. The retries of the official `openai` client are disabled, because it retries even if the
account has no credit. The client's default HTTP library, which becomes slower with the number of parallel requests, is
replaced by aiohttp.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ares_exp.backoff import retry_after_sec
from ares_exp.errors import (
    AuthenticationError,
    ContextOverflowError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    MalformedResponseError,
    PolicyError,
    PreflightError,
    QuotaError,
    RateLimitError,
    RefusalError,
    ServerError,
    UnreachableError,
    UnsendableRequestError,
    WireFormatError,
)
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import EventReader, ResponseStream
from ares_exp.policies.waiting import RequestSlots
from ares_exp.records.secrets import LEAST_CHARS, MASK

if TYPE_CHECKING:
    from openai import AsyncOpenAI, DefaultAioHttpClient

SHOWN_CHARS = 500
MAX_CONNECTIONS = 1024
"""Largest `max_concurrency` to which a run can change. A larger value is possible only at the start of the run."""
REACHED_WITHIN_SEC = 10.0
DRAIN_SEC = 1.0
"""Seconds to wait for the end of the stream after a complete response, so that the connection can be reused."""

VERSION_HEADER = "X-Policy-Version"
"""Response header with the version of the weights, for servers that cannot add `policy_version` to the body."""
_STREAMED = "X-Stainless-Raw-Response"
"""Request header that makes the official client return the response before its body has arrived."""

_BY_NAME: dict[str, type[EndpointError]] = {
    "context_length_exceeded": ContextOverflowError,
    "exceed_context_size_error": ContextOverflowError,
    "insufficient_quota": QuotaError,
    "credit_balance_exhausted": QuotaError,
    "organization_spend_limit_exceeded": QuotaError,
    "project_spend_limit_exceeded": QuotaError,
    "organization_usage_limit_exceeded": QuotaError,
    "billing_hard_limit_reached": QuotaError,
    "billing_error": QuotaError,
    "content_filter": RefusalError,
    "content_policy_violation": RefusalError,
}
_BY_STATUS: dict[int, type[EndpointError]] = {
    401: AuthenticationError,
    402: QuotaError,
    403: AuthenticationError,
    408: EndpointTimeoutError,
    429: RateLimitError,
}
_STATUS_BY_NAME = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "server_error": 500,
    "api_error": 500,
    "overloaded_error": 529,
    "timeout_error": 504,
    "authentication_error": 401,
    "permission_error": 403,
    "billing_error": 402,
    "not_found_error": 404,
    "request_too_large": 413,
}
"""HTTP statuses for errors that servers send with status 200. Keys are the error names of OpenAI and Anthropic."""

_TOO_LONG_PARAMETERS = ("input_tokens", "input_text")
_TOO_LONG_WORDS = ("context length", "context size", "context window", "context limit", "prompt is too long")
_TOO_LONG_STATUSES = (400, 413, 422)

_TRIED_AGAIN = (408, 409, 429)
_REMEDIES: dict[type[EndpointError], str] = {
    AuthenticationError: "Check the key in {key}, and its permissions.",
    ContextOverflowError: (
        "The conversation is too long for the model. Use a model with a longer context, or a smaller limits.steps."
    ),
    QuotaError: "Add credit or raise the limit, then resume the run.",
}


@dataclass(frozen=True, slots=True)
class EndpointWire:
    """The format and the path of requests for one API.

    Attributes:
        policy: Option `policy=…` that uses the API. Error messages contain it.
        path: Path relative to the base URL.
        answered_in: Name of a field that only successful responses have. A body without it is searched for an error.
        read: Function that converts the parsed body of a response. Its keyword arguments are `strict` and `report`.
        streamed: Class that assembles streamed responses.
        stream_fields: Request fields that enable streaming, and make the stream contain token counts.
        key_header: Header for the API key; `None` for `Authorization: Bearer`.
        headers: Headers of every request.
    """

    policy: str
    path: str
    answered_in: str
    read: Callable[..., LLMResponse]
    streamed: type[ResponseStream]
    stream_fields: Mapping[str, Any] = field(default_factory=lambda: {"stream": True})
    key_header: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Endpoint:
    """An HTTP endpoint of an LLM. The first request connects, and ties this object to the current event loop.

    Attributes:
        base_url: URL including the version.
        key: API key that replaces the key in the environment variable; `None` to use the environment variable.
        slots: Slots that limit the number of concurrent requests. A caller holds one slot during each call of `post`.
        max_connections: Largest number of slots to which a run in progress can change.
    """

    def __init__(
        self,
        wire: EndpointWire,
        *,
        base_url: str,
        api_key_env: str | None,
        max_concurrency: int,
        max_response_bytes: int,
        stream_idle_sec: float,
    ) -> None:
        """Stores the settings. `EndpointPolicy` describes the options with the same names."""
        self.base_url = base_url.rstrip("/")
        self.key: str | None = None
        self._wire = wire
        self._api_key_env = api_key_env
        self.slots = RequestSlots(max_concurrency)
        self.max_connections = max(max_concurrency, MAX_CONNECTIONS)
        self._max_response_bytes = max_response_bytes
        self._stream_idle_sec = stream_idle_sec
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._secret = ""
        self._headers: dict[str, Any] = {}

    async def post(
        self,
        body: Mapping[str, Any],
        *,
        timeout_sec: float,
        headers: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> Any:
        """Posts a request once. Returns the parsed JSON body, or the assembled body of a streamed response.

        Args:
            body: Body of the request.
            timeout_sec: Time limit in seconds, from the request to the complete response.
            headers: Further headers.
            url: URL of the request on the same server. Default: the path of the API at the base URL.

        Raises:
            EndpointError: The endpoint sent no complete, successful response within `timeout_sec`.
            MalformedResponseError: The response is too large, or is neither JSON nor a valid stream.
            UnsendableRequestError: `body` cannot be sent.
            PreflightError: The package `openai` is not installed, or the key is missing.
        """
        client = self._connect()
        url = url or f"{self.base_url}/{self._wire.path}"
        try:
            async with asyncio.timeout(timeout_sec):
                llm_response = await self._read(client, url, body, headers or {})
            failure: PolicyError | None = self._failure_in(llm_response, f"POST {url}")
            if failure is None:
                return llm_response
        except Exception as error:
            failure = self._failure(error, f"POST {url}", timeout_sec)
            if failure is None:
                raise
        # Raised outside of the handler, so that no chained exception shows the removed secrets.
        raise failure

    async def check(self, *, timeout_sec: float) -> list[str]:
        """Checks with `GET {base_url}/models` that the endpoint is reachable and accepts the key.

        Returns:
            Names of all models. The list is empty if the endpoint lists no models, or not all of them on one page.

        Raises:
            PreflightError: The endpoint cannot be reached or rejects the key. The message suggests a fix.
        """
        names, failure = await self._models(timeout_sec)
        if not isinstance(failure, EndpointError):
            return names
        if failure.status is None:
            raise PreflightError(f"{failure} Check that the server is running and that policy.base_url is correct.")
        if failure.status in (401, 403):
            raise PreflightError(str(failure))
        return []

    async def check_reachable(self) -> None:
        """Checks that the endpoint responds, even with an error.

        Raises:
            UnreachableError: The endpoint cannot be reached.
        """
        _, failure = await self._models(REACHED_WITHIN_SEC)
        if isinstance(failure, EndpointError) and failure.status is None:
            raise UnreachableError(str(failure))

    async def _models(self, timeout_sec: float) -> tuple[list[str], PolicyError | None]:
        client = self._open()
        try:
            async with (
                asyncio.timeout(timeout_sec),
                client.models.with_streaming_response.list(extra_headers=self._headers) as response,
            ):
                return _model_names(await self._whole(response)), None
        except Exception as error:
            if (failure := self._failure(error, f"GET {self.base_url}/models", timeout_sec)) is None:
                raise
            return [], failure
        finally:
            await client.close()

    def scrub(self, text: str) -> str:
        """Returns `text` with the key masked."""
        return text.replace(self._secret, MASK) if len(self._secret) >= LEAST_CHARS else text

    async def post_apart(self, body: Mapping[str, Any], *, url: str, timeout_sec: float) -> Any:
        """Calls `post` with a connection of its own, so that any event loop can call this method."""
        apart = copy.copy(self)
        apart._client = None
        try:
            return await apart.post(body, timeout_sec=timeout_sec, url=url)
        finally:
            await apart.close()

    async def close(self) -> None:
        """Closes the connections. Idempotent. A later request opens new connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _connect(self) -> AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if self._client is None:
            self._client, self._loop = self._open(), loop
        if self._loop is not loop:
            raise RuntimeError("This policy has connections on another event loop. Await its close() there first.")
        return self._client

    def missing(self) -> list[str]:
        """Returns error messages for an unusable key and a missing `openai` package, each with a suggested fix."""
        problems = []
        for open_part in (self._key, self._transport):
            try:
                open_part()
            except PreflightError as error:
                problems.append(str(error))
        return problems

    def _transport(self) -> DefaultAioHttpClient:
        try:
            from openai import DefaultAioHttpClient

            most = self.max_connections
            limits = _http_library().Limits(max_connections=most, max_keepalive_connections=most)
            return DefaultAioHttpClient(limits=limits, timeout=None)
        except (ImportError, RuntimeError):  # RuntimeError: openai is installed, aiohttp is not.
            raise PreflightError(
                f"policy={self._wire.policy} needs the official `openai` client: pip install 'ares-exp[openai]'."
            ) from None

    def _open(self) -> AsyncOpenAI:
        self._secret = key = self._key()
        transport = self._transport()
        from openai import AsyncOpenAI, Omit

        # The client requires a key and accepts this value for "no key".
        keyed = {self._wire.key_header: key} if key and self._wire.key_header is not None else {}
        unkeyed = {} if key and not keyed else {"Authorization": Omit()}
        self._headers = {**self._wire.headers, **unkeyed, **keyed}
        return AsyncOpenAI(
            api_key=key or "none",
            base_url=self.base_url,
            max_retries=0,
            timeout=None,
            http_client=transport,
        )

    def _key(self) -> str:
        key = self.key or (os.environ.get(self._api_key_env, "").strip() if self._api_key_env else "")
        if self._api_key_env and not key:
            raise PreflightError(
                f"The environment variable {self._api_key_env} for the API key of {self.base_url} is not "
                f"set. Run `export {self._api_key_env}=…`, name another variable with "
                "policy.api_key_env=…, or set policy.api_key_env=null if the endpoint needs no key."
            )
        if not (key.isascii() and key.isprintable()):
            raise PreflightError(
                f"The API key {f'in {self._api_key_env} ' if self._api_key_env else ''}contains characters "
                "that are not allowed in an HTTP header. Set the key again, without line breaks."
            )
        return key

    async def _read(self, client: AsyncOpenAI, url: str, body: Mapping[str, Any], more: Mapping[str, str]) -> Any:
        # `post` bypasses the client's typed arguments, because their conversion of messages takes milliseconds of CPU
        # time.
        headers = {**self._headers, **more, _STREAMED: "stream"}
        response: Any = await client.post(url, cast_to=cast("Any", object), body=body, options={"headers": headers})
        try:
            if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
                return await self._assembled(response, f"POST {url}")
            llm_response = await self._whole(response)
        finally:
            await response.close()
        with suppress(ValueError, RecursionError):
            body = json.loads(llm_response)
            version = response.headers.get(VERSION_HEADER)
            named = {"policy_version", "weight_version"}
            is_chat = self._wire.answered_in == "choices"
            if version is not None and is_chat and isinstance(body, dict) and not named & body.keys():
                body |= {"policy_version": version, "policy_version_from": "header"}
            return body
        shown = self._shown(llm_response[: 4 * SHOWN_CHARS].decode(errors="replace"))
        raise MalformedResponseError(f"Expected JSON from {url}, got: {shown!r}")

    async def _whole(self, response: Any) -> bytes:
        body = bytearray()
        async for part in response.iter_bytes():
            body += part
            self._check_size(len(body))
        return bytes(body)

    async def _assembled(self, response: Any, request: str) -> Any:
        """Reads a streamed response. Returns the body that the endpoint would have sent without streaming."""
        llm_response, loop = self._wire.streamed(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._stream_idle_sec) as idle:
                async for _ in self._events(response, llm_response):
                    wait_sec = DRAIN_SEC if llm_response.is_complete else self._stream_idle_sec
                    idle.reschedule(loop.time() + wait_sec)
        except TimeoutError:
            if not llm_response.is_complete:
                raise EndpointTimeoutError(
                    f"{request} received no data for {self._stream_idle_sec:g} s in the middle of a streamed response.",
                    retryable=True,
                ) from None
        except WireFormatError as error:
            raise MalformedResponseError(self._shown(str(error))) from None
        except Exception:
            if not llm_response.is_complete:
                raise
        if not llm_response.may_end:
            raise EndpointUnreachableError(f"{request} ended in the middle of a streamed response.", retryable=True)
        return llm_response.body()

    async def _events(self, response: Any, llm_response: ResponseStream) -> AsyncIterator[None]:
        """Passes the events of a stream to `llm_response`. Yields after each part, so that the caller can time it."""
        reader, size = EventReader(), 0
        async for part in response.iter_bytes():
            if llm_response.is_complete:
                continue
            size += len(part)
            self._check_size(size)
            for data in reader.feed(part):
                if not llm_response.is_complete:
                    llm_response.add(data)
            yield

    def _check_size(self, size: int) -> None:
        if size > self._max_response_bytes:
            raise MalformedResponseError(
                f"The response from {self.base_url} has more than {self._max_response_bytes} bytes. To accept larger "
                "responses, raise policy.max_response_bytes."
            )

    def _failure_in(self, body: Any, request: str) -> EndpointError | None:
        """Returns the error in a body that was sent with status 200; `None` if the body has no error."""
        if not isinstance(body, Mapping) or (self._wire.answered_in in body and body.get("status") != "failed"):
            return None
        error = body.get("error")
        status = _status_of(error) if isinstance(error, Mapping) else None
        if status is None or not 400 <= status < 600:
            return None
        return self._refused(request, status, error, {})

    def _failure(self, error: Exception, request: str, timeout_sec: float) -> PolicyError | None:
        """Converts an exception to a `PolicyError`; `None` if neither the endpoint nor the request caused `error`."""
        from aiohttp import ClientConnectorError, ClientError
        from openai import APIConnectionError, APIStatusError

        if isinstance(error, EndpointError | WireFormatError):
            return error
        if isinstance(error, APIStatusError):
            reason = error.response.reason_phrase
            return self._refused(request, error.status_code, error.body or reason, error.response.headers)
        if isinstance(error, TimeoutError):
            return EndpointTimeoutError(f"{request} received no response within {timeout_sec:g} s.", retryable=True)
        if isinstance(error, APIConnectionError | _http_library().HTTPError | ClientError | OSError):
            *_, innermost = chain = list(_chain(error))
            why = self._shown(f"{type(innermost).__name__}: {innermost}")
            failure = EndpointUnreachableError(f"{request} failed: {why}.", retryable=True)
            failure.never_connected = any(isinstance(one, ClientConnectorError) for one in chain)
            return failure
        if isinstance(error, UnicodeEncodeError):
            return UnsendableRequestError(f"The request contains text that is not valid Unicode: {error.reason}.")
        return None

    def _refused(self, request: str, status: int, error: object, headers: Mapping[str, str]) -> EndpointError:
        """Returns the exception for a request to which the server responded with an error object or an error text."""
        fields = error if isinstance(error, Mapping) else {}
        shown = self._shown(str(fields.get("message") or error)).rstrip(".")
        kind = _class_of(status, fields)
        remedy = _REMEDIES.get(kind, "Check policy.model and policy.base_url." if status == 404 else "")
        remedy = remedy.format(key=self._api_key_env or "policy.api_key_env (null now)")
        code = fields.get("code")
        return kind(
            f"{request} returned {status}: {shown}. {remedy}".rstrip(),
            status=status,
            code=None if code is None else str(code),
            retryable=kind in (ServerError, RateLimitError) or (status in _TRIED_AGAIN and kind is not QuotaError),
            retry_after_sec=retry_after_sec(headers),
        )

    def _shown(self, text: str) -> str:
        text = self.scrub(" ".join(text.split()))
        return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _http_library() -> Any:
    """Returns the HTTP module that the installed `openai` uses: `httpx2` since version 3, otherwise `httpx`."""
    import openai

    return importlib.import_module("httpx" if int(openai.__version__.partition(".")[0]) < 3 else "httpx2")


def _model_names(body: bytes) -> list[str]:
    with suppress(ValueError, RecursionError, TypeError, LookupError, AttributeError):
        page = json.loads(body)
        return [] if page.get("has_more") else [str(model["id"]) for model in page["data"]]
    return []


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and then its causes, in order. The first is often only a "Connection error"."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status_of(error: Mapping[Any, Any]) -> int | None:
    """Returns the HTTP status for an error object that was sent with status 200; `None` if it describes no error."""
    named = [name for name in (error.get("code"), error.get("type")) if name is not None]
    for name in named:
        if isinstance(name, int):  # OpenRouter
            return name
        if isinstance(name, str) and name in _STATUS_BY_NAME:
            return _STATUS_BY_NAME[name]
    return 400 if named and error.get("message") else None


def _class_of(status: int, error: Mapping[Any, Any]) -> type[EndpointError]:
    """Returns the error class for an HTTP status and the error object of a server.

    Servers describe an error by an object in the field `error` (SGLang: by the complete body). The fields of this
    object differ between servers:

    | error | servers and their fields |
    |---|---|
    | context overflow | `code: context_length_exceeded` (OpenAI, Azure, OpenRouter, …); `type: exceed_context_size_error` (llama.cpp, https://github.com/ggml-org/llama.cpp/pull/15780); `param: input_tokens` or `input_text` (vLLM since 0.16, `vllm/renderers/params.py`); only in the message (SGLang, older vLLM, Anthropic) |
    | no credit | 402 (OpenRouter, DeepSeek, Together); 429 with `type: insufficient_quota` and several codes (OpenAI, https://platform.openai.com/docs/guides/error-codes); `type: billing_error`, or only in the message (Anthropic) |
    | refusal | 400 with `code: content_filter` (Azure) or `content_policy_violation` (OpenAI); 403 with `metadata.flagged_input` (OpenRouter, https://openrouter.ai/docs/errors) |

    The text of the message is searched only in 4xx responses, and only if `code` and `type` do not contain a known
    name.
    """  # noqa: E501  # the table
    for name in (error.get("code"), error.get("type")):
        if isinstance(name, str) and name in _BY_NAME:
            return _BY_NAME[name]
    message = str(error.get("message")).lower()
    is_too_long = error.get("param") in _TOO_LONG_PARAMETERS or any(word in message for word in _TOO_LONG_WORDS)
    if status in _TOO_LONG_STATUSES and is_too_long:
        return ContextOverflowError
    if status == 400 and "credit balance" in message:
        return QuotaError
    metadata = error.get("metadata")
    if status == 403 and isinstance(metadata, Mapping) and "flagged_input" in metadata:
        return RefusalError
    return _BY_STATUS.get(status, ServerError if status >= 500 else EndpointError)
