"""Streams as servers write them that differ from the vendors' own, put together."""

import json
from typing import Any

import pytest

from ares_exp.errors import WireFormatError
from ares_exp.llms import anthropic_messages, openai_chat, openai_responses
from ares_exp.llms.anthropic_messages import StreamedMessage
from ares_exp.llms.openai_chat import StreamedCompletion
from ares_exp.llms.openai_responses import StreamedResponse
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData
from ares_exp.llms.wire import EventReader, ResponseStream


def put_together(response: ResponseStream, *events: Any) -> dict[str, Any]:
    for event in events:
        response.add(event if isinstance(event, str) else json.dumps(event))
    assert response.may_end
    return response.body()


def completed(*deltas: dict[str, Any], **choice: Any) -> LLMResponse:
    """What deltas make of a chat completion, which must be all that they say."""
    chunks = [{"model": "m", "choices": [{"index": 0, "delta": delta, **choice}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return openai_chat.response_from_body(put_together(StreamedCompletion(), *chunks, end, "[DONE]"))


def call(arguments: str, **more: Any) -> dict[str, Any]:
    name = more.pop("name", None)
    return {"function": {"arguments": arguments} | ({"name": name} if name else {}), **more}


@pytest.mark.parametrize(
    "deltas",
    [
        [[call("{", index=0, id="a", name="f")], [call("}", index=0)], [call("[]", index=1, id="b", name="g")]],
        # Gemini: each call whole, all at the same index, or without one
        [[call("{}", index=0, id="a", name="f")], [call("[]", index=0, id="b", name="g")]],
        [[call("{}", id="a", name="f"), call("[]", id="b", name="g")]],
        # id and name again with each part
        [[call("{", index=0, id="a", name="f")], [call("}", index=0, id="a", name="f")],
         [call("[]", index=1, id="b", name="g")]],
    ],
)  # fmt: skip
def test_tool_calls_are_assembled(deltas: list[Any]) -> None:
    response = completed(*({"tool_calls": calls} for calls in deltas))
    assert response.data == (ToolCallData("a", "f", "{}"), ToolCallData("b", "g", "[]"))


def test_reasoning_is_assembled() -> None:
    def detail(text: str, **more: Any) -> dict[str, Any]:
        return {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": text, **more}]}

    signed = completed(detail("I "), detail("think."), detail("", signature="S"), {"content": "Yes."})
    assert signed.data == (ThinkingData("I think.", "S"), TextData("Yes."))
    thought = [{"thinking": [{"type": "text", "text": text}], "type": "thinking"} for text in ("I ", "think.")]
    parts = completed({"content": [thought[0]]}, {"content": [thought[1]]}, {"content": "Y"}, {"content": "es."})
    assert parts.data == (ThinkingData("I think."), TextData("Yes."))
    assert completed({"reasoning_content": "I "}, {"reasoning_content": "think."}).thinking[0].content == "I think."


def test_token_ids_and_logprobs_are_assembled() -> None:
    def chunk(text: str, ids: list[int], **more: Any) -> dict[str, Any]:
        logprobs = {"content": [{"token": text, "logprob": -float(one), "top_logprobs": []} for one in ids]}
        return {"choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids, "logprobs": logprobs}], **more}

    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "prompt_token_ids": None}
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}}
    body = put_together(StreamedCompletion(), chunk("a", [1, 2], prompt_token_ids=[8, 9]), chunk("b", [3]), end, usage)
    response = openai_chat.response_from_body(body)
    assert (response.prompt_token_ids, response.completion_token_ids) == ((8, 9), (1, 2, 3))
    assert response.logprobs == (-1.0, -2.0, -3.0)
    assert (response.text, response.usage.total_tokens) == ("ab", 5)


@pytest.mark.parametrize(
    ("response", "event", "error"),
    [
        # OpenRouter: beside a choice
        (StreamedCompletion(), {"error": {"code": 429, "message": "slow"}, "choices": [{"finish_reason": "error"}]},
         {"type": "server_error", "code": 429, "message": "slow"}),
        (StreamedCompletion(), {"error": "broken"}, {"type": "server_error", "message": "broken"}),
        (StreamedResponse(), {"type": "error", "code": None, "message": "broken", "param": None},
         {"type": "server_error", "message": "broken"}),
        (StreamedMessage(), {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}},
         {"type": "overloaded_error", "message": "busy"}),
    ],
)  # fmt: skip
def test_errors_are_passed_on(response: ResponseStream, event: dict[str, Any], error: dict[str, Any]) -> None:
    assert put_together(response, event) == {"error": error}


def test_items_missing_in_last_event_are_kept() -> None:
    items = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in "ab"]
    events = [{"type": "response.output_item.done", "output_index": 1 - at, "item": items[1 - at]} for at in (0, 1)]
    end = {"type": "response.completed", "response": {"status": "completed", "output": []}}
    response = openai_responses.response_from_body(put_together(StreamedResponse(), *events, end))
    assert response.data == (ToolCallData("a", "a", "{}"), ToolCallData("b", "b", "{}"))


def test_truncated_tool_call_is_kept() -> None:
    start = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    body = put_together(
        StreamedMessage(),
        {"type": "message_start", "message": {"model": "m", "usage": {"input_tokens": 7, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": start},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"x": "y'}},
        {"type": "new_event"},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    )
    response = anthropic_messages.response_from_body(body)
    assert (response.data, response.finish_reason) == ((ToolCallData("a", "f", '{"x": "y'),), "length")
    assert (response.usage.prompt_tokens, response.usage.generated_tokens) == (7, 9)


def test_unknown_delta_is_named_as_dropped() -> None:
    delta = {"type": "new_delta", "new": 1}
    body = put_together(
        StreamedMessage(),
        {"type": "message_start", "message": {"model": "m"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "hi"}},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "message_stop"},
    )
    lost: list[str] = []
    assert anthropic_messages.response_from_body(body, strict=False, report=lost.append).text == "hi"
    assert "new_delta" in lost[0]


@pytest.mark.parametrize("response", [StreamedCompletion, StreamedResponse, StreamedMessage])
@pytest.mark.parametrize("data", ["{", "[]", "1", '{"type": 1, "choices": 1}', "[" * 100_000])
def test_invalid_event_is_rejected(response: type[ResponseStream], data: str) -> None:
    with pytest.raises(WireFormatError):
        response().add(data)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_events_are_read_in_parts_of_any_size(size: int) -> None:
    written = ': hi\r\n\r\nevent: a\r\ndata: {"ä":\r\ndata:1}\r\n\r\nid: 3\ndata: \u2028 x\n\n\n\ndata: cut'.encode()
    reader = EventReader()
    parts = (written[start : start + size] for start in range(0, len(written), size))
    assert [data for part in parts for data in reader.feed(part)] == ['{"ä":\n1}', "\u2028 x"]
