"""A client of the rollout service (`ares-exp serve`), for trainers.

```
async with Client("http://127.0.0.1:8300") as client:
    submission = await client.submit(["write-greeting"], n=8, policy={"mode": "endpoint", "base_url": engine})
    async for episode in client.episodes(submission):
        learn_from(episode.rows)
```

`BlockingClient` has the same methods for code without an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from ares_exp.backoff import backoff_sec, retry_after_sec
from ares_exp.cancellation import result_of
from ares_exp.errors import ConfigError, ServiceError
from ares_exp.records.validation import explain_validation
from ares_exp.training.sampled_calls import SampledCall
from ares_exp.training.sequences import SequenceReport, TrainingSequence
from ares_exp.training.service import bodies
from ares_exp.training.service.bodies import Submitted
from ares_exp.wrappers.loop_thread import LoopThread

POLL_SEC = 20.0
"""Maximum time in seconds that the service waits for new episodes or requests before it responds without any."""
SUBMIT_GRACE_SEC = 5.0
"""Maximum time in seconds that a cancelled call of `Client.run` waits for the response to its submission."""
CANCEL_LIMIT_SEC = 60.0
"""Time limit in seconds for cancelling a submission after its call of `Client.run` has failed or was cancelled."""

FULL = 429
RETRIED = (None, FULL, 502, 503, 504)
"""HTTP statuses after which a call is retried. `None` stands for no response, because the service is unreachable."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop", "stop_token_ids")
"""Sampling parameters of trainers that `sampling_of` passes on to the service."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


class Episode(bodies.Episode):
    """The result of a rollout. Fields that this version of the client does not know are ignored."""

    model_config = ConfigDict(extra="ignore")

    @property
    def report(self) -> SequenceReport:
        """The rows, for functions such as `verl.agent_loop_outputs`. Rows of an untrainable episode have no reward."""
        rows = tuple(
            TrainingSequence(
                ids=tuple(bodies.decoded(row.ids, "i")),
                mask=tuple(bodies.decoded(row.mask, "B")),
                logprobs=tuple(bodies.decoded(row.logprobs, "f")),
                reward=self.reward if self.trainable else None,
                rewards=self.rewards,
                conversation=row.conversation,
                task=self.task,
                attempt=self.attempt,
                episode_id=self.episode_id or self.rollout_id,
                policy_versions=tuple(row.versions),
                steps=tuple(row.steps),
                starts=tuple(row.starts),
                made=row.made,
                finish_reason=row.finish_reason,
            )
            for row in self.rows or ()
        )
        return SequenceReport(rows, calls=sum(len(row.steps) for row in rows))

    @property
    def sampled_calls(self) -> list[SampledCall]:
        """The LLM calls with their tokens; empty if the submission did not request calls."""
        return [
            SampledCall(
                step=call.step,
                conversation=call.conversation,
                prompt=tuple(bodies.decoded(call.prompt_ids, "i")),
                completion=tuple(bodies.decoded(call.ids, "i")),
                logprobs=tuple(bodies.decoded(call.logprobs, "f")),
                policy_version=call.version,
                finish_reason=call.finish_reason,
            )
            for call in self.calls or ()
        ]


class Request(bodies.TokenRequestFacts):
    """An LLM request for which the trainer samples the response. Fields that the client does not know are ignored."""

    model_config = ConfigDict(extra="ignore")


@dataclass(frozen=True)
class Response:
    """The response that the trainer has sampled for a `Request`. `SampledBody` describes the fields."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    version: str | None = None
    stop: str = "stop"


Sample = Callable[[Request], Awaitable[Response]]


class Client:
    """An asynchronous client of the rollout service.

    A call is retried while the service is full, unreachable or restarting. This is safe, because all calls are
    idempotent.
    """

    def __init__(
        self,
        url: str,
        *,
        key_env: str | None = None,
        timeout_sec: float = 120.0,
        retry_sec: float = 600.0,
        full_sec: float = 86_400.0,
    ) -> None:
        """Stores the arguments. The first call connects.

        Args:
            url: URL of the service, such as `http://127.0.0.1:8300`.
            key_env: Name of the environment variable that contains the service's key; `None` if there is no key.
            timeout_sec: Time limit for one response from the service, in seconds. A call that waits in the service for
                episodes or requests has a longer limit: the maximum wait is added.
            retry_sec: Time limit for the retries of a call while the service is unreachable, in seconds.
            full_sec: Time limit for the retries of a call while the service is full, in seconds.

        Raises:
            ConfigError: The URL is invalid, or the environment variable is not set.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"Expected the URL of the rollout service, got {url!r}. Use a URL like http://HOST:8300.")
        if key_env is not None and not os.environ.get(key_env):
            raise ConfigError(f"The environment variable {key_env} for the key of the rollout service is not set.")
        self.url = url.rstrip("/")
        self._headers = {} if key_env is None else {"Authorization": f"Bearer {os.environ[key_env]}"}
        self._timeout_sec = timeout_sec
        self._retry_sec = retry_sec
        self._full_sec = full_sec
        self._rng = random.Random()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Returns the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the connections."""
        await self.close()

    async def close(self) -> None:
        """Closes the connections. The service cancels running rollouts when it has received no call for `lease_sec`."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self) -> bodies.Info:
        """Returns facts about the service, including its capacity."""
        return _as(bodies.Info, await self._call("GET", "/v1/info"))

    async def tasks(self) -> AsyncIterator[bodies.TaskFacts]:
        """Yields the tasks of the service."""
        page = bodies.TaskPage(tasks=[], next="")
        while page.next is not None:
            query = {"after": page.next} if page.next else {}
            page = _as(bodies.TaskPage, await self._call("GET", "/v1/tasks", query))
            for task in page.tasks:
                yield task

    async def submit(
        self, tasks: Sequence[str], n: int = 1, *, rollout_ids: Sequence[str] | None = None, **submission: Any
    ) -> Submitted:
        """Submits rollouts. Waits while the service is full.

        Args:
            tasks: Names of tasks.
            n: Number of rollouts of each task.
            rollout_ids: Ids of the rollouts, in the order of the tasks; random by default. If the same tasks and ids
                were submitted before, the service returns the existing submission.
            submission: Other fields of the submission, such as `policy`, `want`, `limits` and `max_staleness`.

        Raises:
            ServiceError: The service rejected the submission, or remained full or unreachable during all retries.
        """
        ids = [uuid.uuid4().hex for _ in range(len(tasks) * n)] if rollout_ids is None else list(rollout_ids)
        body = {"tasks": [{"name": name} for name in tasks], "n": n, "rollout_ids": ids, "encoding": "packed"}
        made = await self._call("POST", "/v1/rollouts", body={**body, **submission})
        return _as(Submitted, made)

    async def episodes(
        self, submission: Submitted, *, after: int = 0, acknowledge: bool = True
    ) -> AsyncGenerator[Episode, None]:
        """Yields the episodes of a submission as they finish, until all have finished.

        If the connection is lost, the client reconnects and continues with the next episode.

        Args:
            submission: The submission.
            after: Cursor (`Episode.cursor`) of the last episode that the caller already has; 0 for all episodes.
            acknowledge: Whether to acknowledge each episode when the caller requests the next episode. The service
                then deletes the episode.

        Raises:
            ServiceError: The service rejected the request, or cannot be reached.
        """
        at = {"submission": submission.submission_id, "after": after, "wait": POLL_SEC}
        heard = time.monotonic()
        while True:
            try:
                async with aclosing(self._lines("/v1/episodes", at)) as lines:
                    async for line in lines:
                        heard = time.monotonic()
                        if line.get("complete"):
                            return
                        episode = _as(Episode, line)
                        yield episode
                        at["after"] = episode.cursor
                        if acknowledge:
                            await self.ack(submission, episode.cursor)
                heard = time.monotonic()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if time.monotonic() - heard > self._retry_sec:
                    raise ServiceError(f"The connection to {self.url}/v1/episodes was interrupted: {error}.") from error
                await asyncio.sleep(backoff_sec(1, base_sec=2.0, max_sec=2.0, rng=self._rng))

    async def ack(self, submission: Submitted, cursor: int) -> None:
        """Acknowledges all episodes of a submission up to and including a cursor. The service deletes them."""
        await self._call("POST", "/v1/ack", body={"submission_id": submission.submission_id, "cursor": cursor})

    async def collect(self, submission: Submitted, *, timeout_sec: float | None = None) -> list[Episode]:
        """Waits until all rollouts of a submission have finished. Returns their episodes in the order of the rollouts.

        All episodes are acknowledged just before the call returns.

        Raises:
            ServiceError: The service rejected the request or cannot be reached, or an episode was already acknowledged.
            TimeoutError: The time limit was exceeded. The rollouts continue.
        """
        stream = self.episodes(submission, acknowledge=False)
        async with asyncio.timeout(timeout_sec), aclosing(stream):
            episodes = {one.rollout_id: one async for one in stream}
            if gone := sorted(set(submission.rollout_ids) - set(episodes)):
                raise ServiceError(
                    f"The service no longer has the episodes of {len(gone)} rollouts that were "
                    f"acknowledged before, such as {gone[0]}. Use new rollout ids to run these tasks again."
                )
            await self.ack(submission, max(one.cursor for one in episodes.values()))
        return [episodes[rollout_id] for rollout_id in submission.rollout_ids]

    async def run(
        self, tasks: Sequence[str], n: int = 1, *, sample: Sample | None = None, **submission: Any
    ) -> list[Episode]:
        """Submits rollouts, waits until all have finished, and returns their episodes in the order of the rollouts.

        If this call fails or is cancelled, the rollouts are cancelled.

        Args:
            tasks: Names of tasks.
            n: Number of rollouts of each task.
            sample: Function that samples responses with the trainer's model. Required for the policy mode `relay`.
            submission: Other arguments of `submit`.

        Raises:
            ServiceError: The service rejected the submission, or remained full or unreachable during all retries.
        """
        submitting = asyncio.create_task(self.submit(tasks, n, **submission))
        try:
            made = await result_of(submitting)
            async with asyncio.TaskGroup() as group:
                relay = None if sample is None else group.create_task(self.relay(made, sample))
                episodes = await self.collect(made)
                if relay is not None:
                    relay.cancel()
        except BaseException as error:
            try:
                await asyncio.wait({submitting}, timeout=SUBMIT_GRACE_SEC)  # the service may have accepted the rollouts
            finally:
                is_cancelled = submitting.cancel()
            if not is_cancelled and submitting.exception() is None:
                with suppress(ServiceError, TimeoutError):
                    async with asyncio.timeout(CANCEL_LIMIT_SEC):
                        await self.cancel(submitting.result())
                        await self.collect(submitting.result())  # acknowledges the cancelled episodes
            raise _first(error) from None
        return episodes

    async def status(self, rollout_id: str) -> bodies.RolloutFacts:
        """Returns the state of a rollout."""
        return _as(bodies.RolloutFacts, await self._call("GET", f"/v1/rollouts/{rollout_id}"))

    async def cancel(self, what: Submitted | str, *, keep: str = "nothing") -> None:
        """Cancels a submission or one rollout, and returns when its containers are released.

        Args:
            what: The submission, or the id of a rollout.
            keep: Content of the cancelled episodes: `nothing`, or `calls` for the LLM calls before the cancellation.
        """
        path = f"submissions/{what.submission_id}" if isinstance(what, Submitted) else f"rollouts/{what}"
        await self._call("POST", f"/v1/{path}/cancel", body={"keep": keep})

    async def versions(self, version: str, index: int | None = None) -> bodies.ServiceState:
        """Announces the version of the weights that generates responses from now on.

        Args:
            version: Name of the version.
            index: Number of the version. The age of a response is the difference between two such numbers. Defaults to
                `version` if it is a number, otherwise to the largest known number plus 1.
        """
        return await self._state("POST", "versions", {"version": version, "index": index})

    async def pause(
        self, scope: str = "requests", *, drain_sec: float = 0.0, for_sec: float | None = None
    ) -> bodies.ServiceState:
        """Pauses LLM requests, or the start of episodes.

        Args:
            scope: `requests` to pause LLM requests, `starts` to pause the start of episodes.
            drain_sec: Maximum time in seconds to wait until no request is in flight.
            for_sec: Number of seconds after which the service resumes automatically. Default: 600.
        """
        body = {"scope": scope, "drain_sec": drain_sec, **({} if for_sec is None else {"for_sec": for_sec})}
        return await self._state("POST", "pause", body, wait_sec=drain_sec)

    async def resume(self, scope: str | None = None) -> bodies.ServiceState:
        """Resumes LLM requests or the start of episodes after `pause`. By default, resumes both."""
        return await self._state("POST", "resume", {"scope": scope})

    async def state(self) -> bodies.ServiceState:
        """Returns the active pauses, the number of LLM requests in flight, and the version of the weights."""
        return await self._state("GET", "state")

    async def _state(self, method: str, path: str, body: Any = None, *, wait_sec: float = 0.0) -> bodies.ServiceState:
        return _as(bodies.ServiceState, await self._call(method, f"/v1/{path}", body=body, wait_sec=wait_sec))

    async def requests(self, submission: Submitted, *, limit: int = 64) -> AsyncIterator[Request]:
        """Yields the LLM requests of a submission with the policy mode `relay`. Never ends.

        A request is yielded again if the service receives no response to it within the lease (`Request.deadline`).
        """
        query = {"submission": submission.submission_id, "wait": POLL_SEC, "max": limit}
        while True:
            for one in (await self._call("GET", "/v1/requests", query, wait_sec=POLL_SEC))["requests"]:
                yield _as(Request, one)

    async def respond(self, request: Request, response: Response) -> None:
        """Sends the response to a request from `requests`. The service ignores further responses to this request."""
        sampled = {"ids": list(response.ids), "logprobs": list(response.logprobs)}
        body = {"request_id": request.request_id, **sampled, "version": response.version, "stop": response.stop}
        await self._call("POST", "/v1/responses", body=body)

    async def relay(self, submission: Submitted, sample: Sample) -> None:
        """Responds to all LLM requests of a submission with the policy mode `relay`, until this call is cancelled.

        Requests are processed concurrently: `sample` is called for each of them.

        Raises:
            Exception: The first exception that `sample` raised.
        """
        running: set[str] = set()

        async def respond(request: Request) -> None:
            await self.respond(request, await sample(request))
            running.discard(request.request_id)

        try:
            async with asyncio.TaskGroup() as group:
                async for request in self.requests(submission):
                    if request.request_id not in running:
                        running.add(request.request_id)
                        group.create_task(respond(request))
        except BaseExceptionGroup as error:
            raise _first(error) from None

    async def _lines(self, path: str, query: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        rest = b""
        async with await self._open("GET", path, query, None, wait_sec=POLL_SEC, read=False) as response:
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)

    async def _call(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None, *, wait_sec: float = 0.0
    ) -> Any:
        response = await self._open(method, path, query, body, wait_sec=wait_sec, read=True)
        return await response.json()

    async def _open(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Any, *, wait_sec: float, read: bool
    ) -> aiohttp.ClientResponse:
        """Sends a request, and retries it within the time limits while the service is full or unreachable."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        started = time.monotonic()
        limit = aiohttp.ClientTimeout(sock_connect=self._timeout_sec, sock_read=self._timeout_sec + wait_sec)
        for tries in itertools.count(1):
            pause_sec = backoff_sec(tries, base_sec=0.5, max_sec=10.0, rng=self._rng)
            try:
                response = await self._session.request(method, self.url + path, params=query, json=body, timeout=limit)
                if read or response.status >= 400:
                    await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = ServiceError(f"{method} {self.url}{path} failed: {type(error).__name__}: {error}.")
            else:
                if response.status < 400:
                    return response
                said: Any = None
                with suppress(ValueError, aiohttp.ClientError):
                    said = json.loads(await response.read())
                told = said.get("error") if isinstance(said, Mapping) else None
                told = told if isinstance(told, Mapping) else {"message": told or response.reason}
                message = f"{response.method} {response.url} returned {response.status}: {told.get('message')}"
                failure = ServiceError(message, status=response.status, code=told.get("type"))
                asked = retry_after_sec(response.headers)
                pause_sec = pause_sec if asked is None else asked
            limit_sec = self._full_sec if failure.status == FULL else self._retry_sec
            if failure.status not in RETRIED or time.monotonic() + pause_sec - started > limit_sec:
                raise failure
            if tries == 1 and failure.status != FULL:
                logger.warning("%s Retrying for up to %g s.", failure, limit_sec)
            await asyncio.sleep(pause_sec)
        raise AssertionError


class BlockingClient:
    """A `Client` whose methods block, for code without an event loop. Async iterators become ordinary iterators."""

    def __init__(self, url: str, **options: Any) -> None:
        """Creates a `Client` with the same arguments, and a thread with an event loop."""
        self._thread = LoopThread("client of the rollout service")
        self._client = Client(url, **options)

    def __enter__(self) -> Self:
        """Returns the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connections and ends the thread."""
        self.close()

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        self._thread.close(self._client.close)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a blocking version of the method `name` of `Client`."""
        method = getattr(self._client, name)
        if inspect.isasyncgenfunction(method):
            return partial(self._iterated, method)
        return lambda *args, **kwargs: self._thread.run(method(*args, **kwargs))

    def _iterated(self, method: Callable[..., AsyncGenerator[T, None]], *args: Any, **kwargs: Any) -> Iterator[T]:
        values = method(*args, **kwargs)
        try:
            while True:
                try:
                    yield self._thread.run(anext(values))
                except StopAsyncIteration:
                    return
        finally:
            self._thread.run(values.aclose())


def sampling_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those sampling parameters of a trainer that the service supports, by their Chat Completions names."""
    named = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in params.items()}
    return {name: value for name, value in named.items() if name in SAMPLING and value is not None}


def _as(kind: type[B], body: Any) -> B:
    """Converts the JSON body of a response to the class `kind`. Raises `ServiceError` if the body is invalid."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise ServiceError(
            f"The rollout service returned an invalid {kind.__name__}: {explain_validation(error)}. Use the same "
            "version of ares_exp for the service and the client."
        ) from None


def _first(error: BaseException) -> BaseException:
    """Returns the first error in nested exception groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
