"""Functions that all wire formats use to read requests: JSON parsing, checks, and collection of dropped fields."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ares_exp.agents.interception.served_wire import Asked
from ares_exp.errors import WireFormatError
from ares_exp.llms.chat_messages import parts_of, split_system
from ares_exp.llms.request import LLMRequest, Origin, freeze
from ares_exp.llms.responses_tools import ToolForm
from ares_exp.llms.wire import refuse_constant, shorten, typed

MAX_DEPTH = 100
"""Maximum depth of nested lists and objects in a body. Tool schemas of real requests have fewer than 20 levels."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME = re.compile(r"`([^`]+)`")


def parse_body(raw: bytes) -> Any:
    r"""Parses the JSON body of a request.

    Replaces unpaired surrogates (such as `\ud83d`), which occur where a client has cut a string, with U+FFFD.

    Raises:
        WireFormatError: The body is not JSON, is nested too deeply, or contains invalid numbers.
    """
    try:
        body = json.loads(raw, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireFormatError(f"Expected a JSON body, got {shorten(raw[:80])}: {error}") from None
    return _checked(body, bool(_SURROGATE.search(raw)))


def _checked(value: Any, mend: bool, depth: int = 0) -> Any:
    """Returns `value` after checking its depth and numbers. If `mend` is set, replaces unpaired surrogates."""
    if depth > MAX_DEPTH:
        raise WireFormatError(f"Expected JSON with at most {MAX_DEPTH} levels of nesting, got more levels")
    if isinstance(value, dict):
        return {_whole(key) if mend else key: _checked(item, mend, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, mend, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise WireFormatError(f"Expected numbers that fit into a 64-bit float, got {value}")
    return _whole(value) if mend and isinstance(value, str) else value


def _whole(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Losses:
    """Collects the names of body fields that are dropped because an `LLMRequest` cannot represent them.

    An instance can be passed as the `report` argument of a function that converts a body to a request.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __call__(self, text: str) -> None:
        """Adds the field that the warning `text` names in backquotes."""
        found = _NAME.search(text)
        self.add(found[1] if found else text)

    def add(self, name: str) -> None:
        """Adds the name of a field. A repeated name is stored once."""
        self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names in sorted order, so that the order of fields in the body does not matter."""
        return tuple(sorted(self._names))


def take(body: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a body into the fields outside of `names` and the non-empty fields in `names`."""
    wanted = frozenset(names)
    rest = {key: value for key, value in body.items() if key not in wanted}
    return rest, {key: body[key] for key in body if key in wanted and body[key] not in (None, [], {}, "")}


def make_asked(
    request: LLMRequest,
    *,
    wire: str,
    model: str | None,
    prefix: str,
    sampling: Mapping[str, Any],
    losses: Losses,
    wants_usage: bool = True,
    forms: Mapping[str, ToolForm] | None = None,
) -> Asked:
    """Creates an `Asked` from a request and the values that a wire has read. The response's id starts with `prefix`.

    Raises:
        WireFormatError: The request contains only the URL of some media, not their bytes.
    """
    _refuse_remote_media(request)
    if request.metadata:
        losses.add("metadata")
    system_prompt, messages = split_system(request)
    origin = Origin(wire, model=model or "", sampling=freeze(sampling), dropped=losses.names)
    return Asked(
        request=replace(request, messages=messages, system_prompt=system_prompt, metadata=None, origin=origin),
        streamed=request.stream,
        model=model or "",
        response_id=f"{prefix}{uuid.uuid4().hex}",
        created=int(time.time()),
        wants_usage=wants_usage,
        forms=forms or {},
    )


def _refuse_remote_media(request: LLMRequest) -> None:
    """Rejects media with a remote URL, because fetching it would bypass the network policy of the agent's container."""
    for message in request.messages:
        for part in parts_of(message):
            kind = part.get("type")
            value = part.get(kind) if isinstance(kind, str) else None
            if kind in ("image_url", "video_url", "audio_url"):
                url = value.get("url") if isinstance(value, Mapping) else value
                if not (isinstance(url, str) and url.startswith("data:")):
                    raise WireFormatError(
                        f"Expected `{kind}` to be a data: URL, got {shorten(url)}. Remote media are not "
                        "supported: embed the data."
                    )
            elif kind == "file" and not (isinstance(value, Mapping) and isinstance(value.get("file_data"), str)):
                raise WireFormatError(
                    f"Expected `file` to contain `file_data`, got {shorten(value)}. Remote files are not supported: "
                    "embed the data."
                )


def estimate_tokens(body: Any) -> int:
    """Estimates the number of tokens in a request body: one per four characters, and 1600 for each media file.

    Raises:
        WireFormatError: The body is not a JSON object.
    """
    return max(1, _characters(typed(body, "the request", Mapping)) // CHARS_PER_TOKEN)


CHARS_PER_TOKEN = 4
MEDIA_CHARS = 1600 * CHARS_PER_TOKEN
_DATA_CHARS = 20_000
"""Length above which `estimate_tokens` takes a text without spaces for an encoded media file."""


def _characters(value: Any) -> int:
    if isinstance(value, str):
        is_media = len(value) > _DATA_CHARS and " " not in value[:_DATA_CHARS]
        return MEDIA_CHARS if is_media else len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 4
