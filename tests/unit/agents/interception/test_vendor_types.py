"""Every response and every event, validated by the types of the vendors' packages: their clients look at less.

Google's package is large, so its type `GenerateContentResponse` is a recorded JSON schema, without descriptions.
"""

import json
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from ares_exp.agents.interception.agent_endpoint import WIRES
from ares_exp.agents.interception.served_wire import Wire
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from tests.wire_server import event_data

TYPES = {
    "chat_completions": ("openai.types.chat:ChatCompletion", "openai.types.chat:ChatCompletionChunk"),
    "responses": ("openai.types.responses:Response", "openai.types.responses:ResponseStreamEvent"),
    "messages": ("anthropic.types:Message", "anthropic.types:RawMessageStreamEvent"),
}
"""Of a whole response and of an event; by name, since to import them takes everyone who collects the tests a second."""
CUSTOM = {"type": "custom", "name": "patch"}
BODIES: dict[str, dict[str, Any]] = {
    "chat_completions": {"messages": [], "stream_options": {"include_usage": True}},
    "responses": {"input": "hello", "tools": [CUSTOM, {"type": "local_shell"}]},
    "messages": {"messages": []},
    "generate_content": {"contents": []},
}
GOOGLE = Path(__file__).parents[3] / "fixtures" / "generate_content_response.schema.json"
CALLS = {"bash": "{}", "patch": '{"input": "x"}', "local_shell": '{"command": ["ls"]}', "other": "{broken"}
RESPONSES = {
    "everything": LLMResponse(
        [
            ThinkingData("hm"),
            ThinkingData("data", redacted=True),
            TextData("look"),
            *(ToolCallData("", name, arguments) for name, arguments in CALLS.items()),
        ],
        usage=Usage(10, 5, cached_tokens=4, cache_write_tokens=2, reasoning_tokens=3),
    ),
    "nothing": LLMResponse([]),
    "cut off": LLMResponse.from_text("x", finish_reason="length"),
    "filtered": LLMResponse.from_text("x", finish_reason="content_filter"),
    "a refusal": LLMResponse.from_text("x", finish_reason="refusal"),
}


def validators(wire: str) -> list[Callable[[Any], object]]:
    if wire == "generate_content":
        return [Draft202012Validator(json.loads(GOOGLE.read_text())).validate] * 2
    return [TypeAdapter(resolve_name(kind)).validate_python for kind in TYPES[wire]]


@pytest.mark.parametrize("what", RESPONSES)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_responses_have_the_vendor_types(wire: Wire, what: str) -> None:
    whole, event = validators(wire.name)
    asked = wire.read({**BODIES[wire.name], "model": "policy", "stream": True})
    whole(json.loads(wire.whole(asked, RESPONSES[what])))
    written = [wire.opening(asked), wire.keepalive(asked, 1), *wire.events(asked, RESPONSES[what], 1)]
    told = [one for one in event_data(b"".join(written)) if one.get("type") != "ping"]  # which is not in the types
    assert len(told) >= (1 if wire.name == "generate_content" else 3)
    for one in told:
        event(one)
