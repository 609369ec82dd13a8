"""The part of `ares-exp serve` that takes the place of a trainer: it serves rollouts until the run is interrupted.

Its HTTP server checks API keys, parses bodies, and converts errors to responses. `OPERATIONS` describes its operations.
The OpenAPI document is generated from them and from the types of the bodies.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema

from ares_exp import __version__
from ares_exp.cancellation import happened, in_thread
from ares_exp.config.targets import documented
from ares_exp.errors import ConfigError, PreflightError, UserError, WireFormatError
from ares_exp.policies.policy import Policy
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.records.validation import explain_validation
from ares_exp.runs.trainer import TrainedRun
from ares_exp.training.driver import EpisodeDriver
from ares_exp.training.service import bodies
from ares_exp.training.service.rollout_policies import WIRES, RolloutPolicies
from ares_exp.training.service.served_rollouts import (
    ConflictError,
    FullError,
    Rollout,
    ServedRollouts,
    UnknownError,
)
from ares_exp.training.service.service_record import ServiceRecord

MAX_BODY_BYTES = 64 * 2**20
WRITE_SEC = 60.0
"""Time limit in seconds to read the body of a request, or to write a part of a response."""
RETRY_AFTER_SEC = 2
LOOPBACK = ("127.0.0.1", "localhost", "::1")

B = TypeVar("B", bound=BaseModel)

logger = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
JSON = "application/json"
REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation (method and path) of the service.

    Attributes:
        path: Path, with parameters in braces.
        about: Summary: what the operation does.
        returns: Type of the response.
        body: Type of the body; `None` if there is no body.
        query: Type of the query; `None` if there is no query.
        status: Status of a successful response.
        errors: Statuses of errors that the operation can return, in addition to 400, 401 and 403.
        media: Media type of the response. With `NDJSON`, each line has the type `returns`.
    """

    name: str
    method: str
    path: str
    about: str
    returns: type[BaseModel] | None
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()
    media: str = JSON


OPERATIONS = (
    Operation("info", "GET", "/v1/info", "Returns facts about the service, and its capacity.", bodies.Info),
    Operation("tasks", "GET", "/v1/tasks", "Lists the tasks.", bodies.TaskPage, query=bodies.TasksQuery),
    Operation(
        "submit",
        "POST",
        "/v1/rollouts",
        "Submits rollouts. If the rollout_ids were submitted before, returns the earlier submission.",
        bodies.Submitted,
        body=bodies.SubmissionBody,
        status=202,
        errors=(409, 429),
    ),
    Operation(
        "episodes",
        "GET",
        "/v1/episodes",
        "Streams the episodes that are not acknowledged, as they finish. A line with `complete: true` follows the last "
        "episode of a submission.",
        bodies.Episode,
        query=bodies.EpisodesQuery,
        errors=(404,),
        media=NDJSON,
    ),
    Operation("ack", "POST", "/v1/ack", "Acknowledges episodes.", bodies.Acked, body=bodies.AckBody, errors=(404,)),
    Operation(
        "rollout", "GET", "/v1/rollouts/{id}", "Returns the state of a rollout.", bodies.RolloutFacts, errors=(404,)
    ),
    Operation(
        "cancel_rollout",
        "POST",
        "/v1/rollouts/{id}/cancel",
        "Cancels a rollout, and responds when its container has been released.",
        bodies.Cancelled,
        body=bodies.CancelBody,
        errors=(404, 504),
    ),
    Operation(
        "cancel_submission",
        "POST",
        "/v1/submissions/{id}/cancel",
        "Cancels all rollouts of a submission, and responds when their containers have been released.",
        bodies.Cancelled,
        body=bodies.CancelBody,
        errors=(404, 504),
    ),
    Operation(
        "requests",
        "GET",
        "/v1/requests",
        "Returns LLM requests from the relay, for which the trainer samples the responses.",
        bodies.TokenRequests,
        query=bodies.RequestsQuery,
        errors=(404,),
    ),
    Operation(
        "respond",
        "POST",
        "/v1/responses",
        "Submits the response that the trainer sampled for an LLM request from the relay.",
        bodies.Accepted,
        body=bodies.SampledBody,
    ),
    Operation(
        "version",
        "POST",
        "/v1/versions",
        "Sets the version of the weights for all responses from now on.",
        bodies.ServiceState,
        body=bodies.VersionBody,
    ),
    Operation(
        "pause",
        "POST",
        "/v1/pause",
        "Pauses LLM calls, or the start of episodes.",
        bodies.ServiceState,
        body=bodies.PauseBody,
    ),
    Operation("resume", "POST", "/v1/resume", "Ends pauses.", bodies.ServiceState, body=bodies.ResumeBody),
    Operation("state", "GET", "/v1/state", "Returns the pauses and the calls in flight.", bodies.ServiceState),
    Operation("document", "GET", "/v1/openapi.json", "Returns this document.", None),
)


class ServeOptions(BaseModel):
    """The options `serve.*` of `ares-exp serve`.

    Attributes:
        host: Address to listen on. An address other than a loopback address requires `key_env`.
        port: Port to listen on; 0 selects a free port.
        key_env: Environment variable with the API key that each request must contain.
        queue: Maximum number of running and waiting rollouts.
        unacknowledged: Maximum number of finished episodes that trainers have not acknowledged. The service rejects
            submissions that could exceed it.
        lease_sec: Number of seconds without a call from a trainer after which its rollouts are cancelled.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8300
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    queue: Annotated[int, Field(ge=1)] = 1024
    unacknowledged: Annotated[int, Field(ge=1)] = 4096
    lease_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0


class Service:
    """The trainer of a run that serves rollouts: it runs the rollouts that other processes submit.

    Attributes:
        policy: Policy of the run, which sends the LLM calls of each rollout to the rollout's endpoint.
        url: URL of the service; empty until it accepts requests.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.policy = RolloutPolicies()
        self.url = ""
        self._options = options
        self._listener: socket.socket | None = None
        self._key: str | None = None

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Reads the service's API key, and opens the port. Blocking.

        Raises:
            UserError: The key is missing, or the port cannot be used.
        """
        with suppress(ImportError):
            import openai as openai  # importing it takes a second; the first submission should not wait for it
        host, port, name = self._options.host, self._options.port, self._options.key_env
        if name is not None:
            self._key = os.environ.get(name, "").strip()
            if not self._key:
                raise PreflightError(
                    f"The environment variable {name} for the key of the service is not set. Run `export {name}=…`."
                )
        elif host not in LOOPBACK:
            raise ConfigError(
                f"Expected a loopback address for a service without a key, got `serve.host={host}`. Set "
                "`serve.key_env=NAME` to the environment variable with a key."
            )
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
            )
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}. Set another `serve.port`, or "
                "`serve.port=0` for a free port."
            ) from None

    async def train(self, run: TrainedRun) -> None:
        """Serves requests until the run is interrupted.

        Raises:
            OSError: The state of the service could not be stored.
            UserError: The state of an earlier session cannot be read.
        """
        assert self._listener is not None
        with self._listener:
            rollouts = ServedRollouts(
                EpisodeDriver(run), ServiceRecord(run.run_dir.service), self.policy, self._options
            )
            await rollouts.restore()
            watching = asyncio.create_task(rollouts.watch_leases())
            try:
                async with HttpService(rollouts, run, self._key).listening(self._listener):
                    host, port = self._listener.getsockname()[:2]
                    self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                    with suppress(BrokenPipeError):
                        sys.stdout.write(f"Serving rollouts at {self.url}. Ctrl-C ends the service.\n")
                        sys.stdout.flush()
                    await rollouts.failure
            finally:
                watching.cancel()
                await rollouts.close()


class HttpService:
    """Serves the rollouts of a run over HTTP."""

    def __init__(self, rollouts: ServedRollouts, run: TrainedRun, key: str | None) -> None:
        """Stores the arguments. If the API key is `None`, only requests to a loopback address are accepted."""
        self._rollouts = rollouts
        self._run = run
        self._key = key

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serves requests at an open socket while the body of the `with` statement runs, then ends all requests."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        # Each operation has a method of its name.
        app.add_routes([web.route(one.method, one.path, getattr(self, f"_{one.name}")) for one in OPERATIONS])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks the API key before each request is handled. Converts exceptions to responses with a JSON body."""
        try:
            self._check(request)
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, type(error).__name__, error.text or error.reason)
        except FullError as error:
            return _error(429, "Full", str(error), {"Retry-After": str(RETRY_AFTER_SEC)})
        except ConflictError as error:
            return _error(409, "Conflict", str(error))
        except UnknownError as error:
            return _error(404, "Unknown", str(error))
        except (UserError, WireFormatError, ValidationError) as error:
            said = f"{explain_validation(error)}." if isinstance(error, ValidationError) else str(error)
            return _error(400, type(error).__name__, said)
        except TimeoutError:
            return _error(504, "Timeout", "The request was not completed in time. Send it again.")
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("A request to %s failed", request.path)
            return _error(500, type(error).__name__, str(error))

    def _check(self, request: web.Request) -> None:
        """Raises an `HTTPException` for requests without the API key, and for requests from web pages.

        If the service has no key, only requests to a loopback address are accepted.
        """
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="Requests from web pages are not accepted. Send the request from a program.")
        if self._key is None:
            name = (request.host or "").rpartition(":")[0] if ":" in (request.host or "") else request.host
            if name.strip("[]") not in LOOPBACK:
                raise web.HTTPForbidden(text=f"Expected a request to a loopback address, not to {request.host}.")
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(errors="replace"), self._key.encode()):
            raise web.HTTPUnauthorized(text="Send the key from `serve.key_env` as `Authorization: Bearer KEY`.")

    async def _info(self, request: web.Request) -> web.StreamResponse:
        self._rollouts.renew(self._rollouts.selected(None))
        running, waiting, unacknowledged = self._rollouts.counts()
        return _json(
            bodies.Info(
                protocol=bodies.PROTOCOL,
                ares_exp_version=__version__,
                version=self._rollouts.policies.version,
                tasks=len(self._run.task_names),
                agent=self._run.agent_name,
                modes=["endpoint", "relay"],
                wires=[*WIRES],
                capacity=bodies.Capacity(running=running, waiting=waiting, limit=self._rollouts.options.queue),
                unacknowledged=unacknowledged,
                run_dir=str(self._run.run_dir.path),
            )
        )

    async def _tasks(self, request: web.Request) -> web.StreamResponse:
        query = _query(request, bodies.TasksQuery)
        names = list(self._run.task_names)
        if query.after is not None and query.after not in names:
            raise UnknownError(f"There is no task {query.after!r}.")
        start = 0 if query.after is None else names.index(query.after) + 1
        page = names[start : start + query.limit]
        has_more = start + query.limit < len(names)
        described = await in_thread(lambda: [dict(self._run.describe(name)) for name in page])
        tasks = [bodies.TaskFacts(name=name, metadata=facts) for name, facts in zip(page, described, strict=True)]
        return _json(bodies.TaskPage(tasks=tasks, next=page[-1] if has_more else None))

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, bodies.SubmissionBody)
        submission = await asyncio.shield(self._rollouts.submit(body))  # not cancelled if the client disconnects
        ids = [one.rollout_id for one in submission.rollouts]
        return _json(bodies.Submitted(submission_id=submission.submission_id, rollout_ids=ids), status=202)

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        rollout = self._rollouts.rollout(request.match_info["id"])
        self._rollouts.renew([rollout.submission])
        running = self._run.running().get(rollout.slot) if rollout.cursor is None else None
        return _json(
            bodies.RolloutFacts(
                rollout_id=rollout.rollout_id,
                submission_id=rollout.submission.submission_id,
                group_id=rollout.submission.body.group_id,
                task=rollout.task,
                attempt=rollout.attempt,
                state="running" if running is not None else rollout.state,
                stage=running.waits_for if running is not None else None,
                seconds=round(time.time() - running.started_at, 3) if running is not None else 0.0,
                calls=rollout.calls,
                cursor=rollout.cursor,
                error=rollout.error,
            )
        )

    async def _cancel_rollout(self, request: web.Request) -> web.StreamResponse:
        return await self._cancel(request, [self._rollouts.rollout(request.match_info["id"])])

    async def _cancel_submission(self, request: web.Request) -> web.StreamResponse:
        return await self._cancel(request, self._rollouts.submission(request.match_info["id"]).rollouts)

    async def _cancel(self, request: web.Request, rollouts: list[Rollout]) -> web.StreamResponse:
        body = await _body(request, bodies.CancelBody) if request.can_read_body else bodies.CancelBody()
        self._rollouts.renew([rollouts[0].submission])
        await asyncio.shield(self._rollouts.cancel(rollouts, keep=body.keep))
        return _json(bodies.Cancelled(states={one.rollout_id: one.state for one in rollouts}))

    async def _episodes(self, request: web.Request) -> web.StreamResponse:
        query, rollouts = _query(request, bodies.EpisodesQuery), self._rollouts
        submissions = rollouts.selected(query.submission)
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        await response.prepare(request)
        loop, cursor = asyncio.get_running_loop(), query.after
        until = loop.time() + query.wait
        while True:
            rollouts.renew(submissions)
            changed = rollouts.changed
            available = rollouts.available(submissions, cursor)
            for cursor, one in available:
                if (line := await rollouts.line_at(cursor)) is not None:
                    await _write(response, line)
                    rollouts.delivered(one.submission, cursor)
            is_left = any(one.open for one in submissions) or rollouts.available(submissions, cursor)
            if query.submission is not None and not is_left:
                end = {"submission_id": query.submission, "complete": True}
                await _write(response, json.dumps(end).encode() + b"\n")
                break
            if not await happened(changed, min(1.0, until - loop.time())) and loop.time() >= until:
                break
        await response.write_eof()
        return response

    async def _ack(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, bodies.AckBody)
        self._rollouts.renew(self._rollouts.selected(body.submission_id))
        freed = await asyncio.shield(self._rollouts.acknowledge(body.cursor, body.submission_id))
        return _json(bodies.Acked(freed=freed))

    async def _requests(self, request: web.Request) -> web.StreamResponse:
        query, rollouts = _query(request, bodies.RequestsQuery), self._rollouts
        submissions = rollouts.selected(query.submission)
        rollouts.renew(submissions)
        is_for_all = query.submission is None
        ids = None if is_for_all else {one.rollout_id for each in submissions for one in each.rollouts}
        found = await rollouts.policies.relay.requests(query.wait, query.max, ids)
        rollouts.renew(submissions)
        return web.json_response({"requests": found})

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return _json(
            bodies.Accepted(accepted=self._rollouts.policies.relay.respond(await _body(request, bodies.SampledBody)))
        )

    async def _version(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, bodies.VersionBody)
        await asyncio.shield(self._rollouts.set_version(body.version, body.index))
        return await self._state(request)

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, bodies.PauseBody)
        await self._rollouts.pause(body.scope, drain_sec=body.drain_sec, for_sec=body.for_sec)
        return await self._state(request)

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, bodies.ResumeBody) if request.can_read_body else bodies.ResumeBody()
        for scope in ("requests", "starts") if body.scope is None else (body.scope,):
            self._rollouts.resume(scope)
        return await self._state(request)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        self._rollouts.renew(self._rollouts.selected(None))
        return _json(self._rollouts.state())

    async def _document(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(openapi())


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SEC):
        await response.write(data)


async def _body(request: web.Request, kind: type[B]) -> B:
    if request.content_type != JSON:
        raise web.HTTPUnsupportedMediaType(text=f"Expected {JSON}, got {request.content_type}.")
    async with asyncio.timeout(WRITE_SEC):
        text = await request.read()
    return kind.model_validate_json(text)


def _query(request: web.Request, kind: type[B]) -> B:
    return kind.model_validate(dict(request.query))


def _json(body: BaseModel, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, headers=headers, content_type=JSON)


def _error(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json(
        bodies.ErrorBody(error=bodies.ErrorText(type=kind, message=mask_known_secrets(message))),
        status=status,
        headers=headers,
    )


def openapi() -> dict[str, Any]:
    """Returns the OpenAPI document of the service."""
    kinds: list[type[BaseModel]] = [bodies.ErrorBody]
    for one in OPERATIONS:
        kinds += [kind for kind in (one.body, one.returns) if kind is not None and kind not in kinds]
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    definitions: dict[str, Any] = schemas["$defs"]
    for name, schema in definitions.items():
        _describe(schema, getattr(bodies, name))
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ares_exp rollout service", "version": __version__},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "The key of `serve.key_env`, if it is set."}
            },
        },
    }


def _operation(one: Operation) -> dict[str, Any]:
    schema = {} if one.returns is None else _ref(one.returns)
    parameters: list[dict[str, Any]] = []
    if "{id}" in one.path:
        parameters = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    for name, value in one.query.model_json_schema()["properties"].items() if one.query is not None else ():
        value.pop("title")
        parameters.append({"name": name, "in": "query", "required": False, "schema": value})
    error = {"content": {JSON: {"schema": _ref(bodies.ErrorBody)}}}
    statuses = sorted({400, 401, 403, *one.errors})
    made: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.about,
        "parameters": parameters,
        "responses": {
            str(one.status): {"description": HTTPStatus(one.status).phrase, "content": {one.media: {"schema": schema}}},
            **{str(status): {"description": HTTPStatus(status).phrase, **error} for status in statuses},
        },
    }
    if one.body is not None:
        made["requestBody"] = {"content": {JSON: {"schema": _ref(one.body)}}}
    return made


def _ref(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=kind.__name__)}


def _describe(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Adds the descriptions in the docstring of `kind` to its JSON Schema. Removes titles, which only repeat names."""
    schema["description"] = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    schema.pop("title", None)
    described = documented(f"{kind.__module__}.{kind.__qualname__}")
    for name, value in schema.get("properties", {}).items():
        value.pop("title", None)
        if name in described:
            value["description"] = described[name]
