"""The conversion of requests and responses of the `martian-ares` package into ours and back.

Its records have the fields of ours; only tools are written in another form (name, description, input_schema).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ares_exp.errors import PolicyError
from ares_exp.llms.request import REQUEST_DEFAULTS, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData


def request_from_ares(request: Any) -> LLMRequest:
    """Its request as one of ours. What it does not have keeps our default."""
    values = {name: getattr(request, name, default) for name, default in REQUEST_DEFAULTS.items()}
    if values["tools"] is not None:
        values["tools"] = [_tool(tool) for tool in values["tools"]]
    values["tool_choice"] = _tool_choice(values["tool_choice"])
    return LLMRequest([_message(message) for message in request.messages], **values)


def response_to_ares(response: LLMResponse, module: Any) -> Any:
    """Converts our response into one of the package: text, cost and usage. For reasoning and more it has no place.

    Args:
        response: The response.
        module: `ares.llms.response`.

    Raises:
        PolicyError: The response calls a tool.
    """
    if any(isinstance(piece, ToolCallData) for piece in response.data):
        raise PolicyError("The policy answered with a tool call, and responses of martian-ares hold text only.")
    return module.LLMResponse(
        data=[module.TextData(content=piece.content) for piece in response.data if isinstance(piece, TextData)],
        cost=response.cost,
        usage=module.Usage(
            prompt_tokens=response.usage.prompt_tokens, generated_tokens=response.usage.generated_tokens
        ),
    )


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts a message; a call that stands for itself becomes one of the assistant's."""
    if "role" in message:
        return message
    function = {"name": message["name"], "arguments": message["arguments"]}
    call = {"id": message["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in tool:
        return tool
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return "required" if choice == "any" else choice
