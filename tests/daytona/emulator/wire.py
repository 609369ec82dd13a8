"""Requests and answers as JSON, each checked by the SDK's own models."""

import datetime
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import BaseModel

HALF = web.RequestKey("half", bool)
"""Set in a request of whose answer half is to be sent."""

BODY = web.RequestKey("body", list)
"""What its record says of a request's body that is no JSON."""


@dataclass
class Request:
    """One request that was made.

    Attributes:
        method, path: Path without query.
        query: Its query string's variables.
        body: JSON as sent; of an upload the list of paths; `None`: none.
        status: Status of the response; `None` before the response and for a broken connection.
    """

    method: str
    path: str
    query: dict[str, str]
    body: Any = None
    status: int | None = None


class Cut(Exception):
    """The connection is to be cut."""


class InvalidMessage(Exception):
    """A message that the SDK's model does not take, or that has more than the model knows."""


class Refusal(Exception):
    """Answers a request with an error.

    Attributes:
        status: HTTP status.
        message: For people.
        code: Machine-readable; the daemon's errors have one.
        source: Who refuses, in the daemon's errors.
    """

    def __init__(self, status: int, message: str, code: str | None = None, source: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.source = status, message, code, source

    def response(self, request: web.Request) -> web.Response:
        """In the form of the API, or with a code in the form of the daemon in the sandbox."""
        body = {"statusCode": self.status, "message": self.message, "timestamp": now_text(), "path": request.path_qs}
        if self.code is None:
            body["error"] = HTTPStatus(self.status).phrase
        else:
            body |= {"code": self.code, "method": request.method}
            body |= {"source": self.source} if self.source else {}
        return web.json_response(body, status=self.status)


def check(model: type[BaseModel], data: Any) -> BaseModel:
    """The message as an object of the SDK."""
    try:
        message: Any = model.from_dict(data)  # type: ignore[attr-defined]
    except Exception as error:
        raise InvalidMessage(f"{model.__name__}: {error}") from error
    if unknown := list(_unknown(message)):
        raise InvalidMessage(f"{model.__name__} has no {', '.join(unknown)}")
    return message  # type: ignore[no-any-return]


def _unknown(message: Any) -> Any:
    if isinstance(message, BaseModel):
        yield from getattr(message, "additional_properties", {})
        for name in type(message).model_fields:
            if name != "additional_properties":
                yield from _unknown(getattr(message, name))
    elif isinstance(message, list | tuple):
        for item in message:
            yield from _unknown(item)


def answer(model: type[BaseModel], data: dict[str, Any], status: int = 200) -> web.Response:
    check(model, data)
    return web.json_response(data, status=status)


async def received(request: web.Request, model: type[BaseModel]) -> dict[str, Any]:
    """The JSON body of a request, in a form that the SDK sends."""
    try:
        data = await request.json()
    except ValueError as error:
        raise InvalidMessage(f"{model.__name__}: {error}") from error
    check(model, data)
    return dict(data)


def body_of(raw: bytes, content_type: str) -> Any:
    if content_type != "application/json" or not raw:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def now_text() -> str:
    """The time, as the service writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
