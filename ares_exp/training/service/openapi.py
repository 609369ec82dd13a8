"""The operations of the rollout service, and their OpenAPI document, which is generated from the body types."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ares_exp import __version__
from ares_exp.config.targets import documented
from ares_exp.training.service import bodies

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
