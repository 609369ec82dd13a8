"""Actions as ATIF agent steps, both ways: pieces, token counts, token ids, log-probabilities, cost, model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.llms.request import freeze
from ares_exp.llms.wire import plain
from ares_exp.trajectories.atif.messages import action_calls, call_to_atif, llm_calls, own

_IN_METRICS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def action_to_atif(action: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the agent step that shows an action, and what goes to its `extra.ares_exp`.

    An action that is no answer of an LLM, or an odd one, is shown as its JSON text.
    """
    if _is_answer(action):
        fields, ours = _answer_to_atif(action)
        if freeze(action_from_atif(fields | {"extra": {"ares_exp": ours}})) == action:
            return fields, ours
    return {"message": json.dumps(action, ensure_ascii=False)}, {"json": True}


def action_from_atif(step: Mapping[str, Any]) -> Any:
    """The action that an agent step shows."""
    ours = own(step)
    if ours.get("json"):
        return json.loads(step["message"])
    metrics = step.get("metrics") or {}
    action: dict[str, Any] = {
        "data": ours["data"] if "data" in ours else _pieces(_text(step["message"]), llm_calls(step)),
        "cost": metrics.get("cost_usd") or 0.0,
        "usage": {
            "prompt_tokens": metrics.get("prompt_tokens") or 0,
            "generated_tokens": metrics.get("completion_tokens") or 0,
        },
    }
    action |= {name: metrics[name] for name in _IN_METRICS if metrics.get(name) is not None}
    if step.get("model_name") is not None:
        action["model"] = step["model_name"]
    return action | dict(ours.get("action", {}))


def _is_answer(action: Any) -> bool:
    """Whether an action is an LLM's answer: what ATIF has fields for is of the types that it wants there."""
    if not isinstance(action, Mapping) or not isinstance(action.get("data"), list | tuple):
        return False
    usage = action.get("usage")
    return (
        all(_is_piece(piece) for piece in action["data"])
        and isinstance(usage, Mapping)
        and usage.keys() == {"prompt_tokens", "generated_tokens"}
        and all(type(count) is int for count in usage.values())
        and type(action.get("cost")) in (int, float)
        and isinstance(action.get("model", ""), str)
        and all(_are(action.get(name, ()), int) for name in ("prompt_token_ids", "completion_token_ids"))
        and _are(action.get("logprobs", ()), int, float)
    )


def _answer_to_atif(action: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    pieces = [dict(piece) for piece in action["data"]]
    calls = action_calls(pieces)
    text = "".join(piece["content"] for piece in pieces if "content" in piece)
    rest = {name: action[name] for name in action if name not in ("data", "cost", "usage", "model", *_IN_METRICS)}
    metrics = {
        "prompt_tokens": action["usage"]["prompt_tokens"],
        "completion_tokens": action["usage"]["generated_tokens"],
        "cost_usd": action["cost"],
    }
    ids, logprobs = action.get("completion_token_ids"), action.get("logprobs")
    unequal = ids is not None and logprobs is not None and len(ids) != len(logprobs)
    for name in _IN_METRICS:
        if name in action:
            (rest if unequal and name == "logprobs" else metrics)[name] = action[name]
    fields: dict[str, Any] = {"message": text, "metrics": metrics, "llm_call_count": 1}
    if "model" in action:
        fields["model_name"] = action["model"]
    if calls:
        fields["tool_calls"] = [call_to_atif(*call) for call in calls]
    ours: dict[str, Any] = {} if pieces == _pieces(text, calls) else {"data": pieces}
    return plain(fields), ours | ({"action": rest} if rest else {})


def _pieces(text: str, calls: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
    """An answer's pieces as engines give them: one text, if there is one, then tool calls."""
    said = [{"content": text}] if text or not calls else []
    return [*said, *({"id": call, "name": name, "arguments": arguments} for call, name, arguments in calls)]


def _text(message: str | list[Mapping[str, Any]]) -> str:
    return message if isinstance(message, str) else "".join(part.get("text", "") for part in message)


def _is_piece(piece: Any) -> bool:
    keys = piece.keys() if isinstance(piece, Mapping) else set()
    return keys in ({"content"}, {"id", "name", "arguments"}) and all(isinstance(piece[key], str) for key in keys)


def _are(values: Any, *kinds: type) -> bool:
    return isinstance(values, list | tuple) and set(kinds).issuperset(map(type, values))
