"""Export of trajectories as documents of the Agent Trajectory Interchange Format (ATIF) v1.8.

| in ares_exp | in the document |
|---|---|
| `system_prompt` | a system step |
| a user message | a user step, or the result of the preceding command, as the LLM saw it |
| a tool message | a result of the tool call with the same id |
| an action | an agent step: text, tool calls, metrics (tokens, cost, token ids, logprobs), `model_name` |
| reasoning | `reasoning_content` of the agent step |
| an assistant message that is not an action | an agent step with `is_copied_context` and without an LLM call |
| a command | a tool call `bash` in the agent step; if the LLM made tool calls, only these are in the step |
| `tools` | `agent.tool_definitions` |
| the response to a sub-agent or a background request | an agent step with its `conversation` in `extra.ares_exp` |
| a request of a different conversation | a system step with `extra.context_management` |
| a rewritten history | a system step with `extra.context_management`, whose observation has the remaining messages |

`extra.ares_exp` contains more data. In the document, it has the fields of `EpisodeTrajectory`. In an agent step, it has
the `record` (reward, discount, seconds), other fields of the `action`, and `commands` that are not tool calls. A run
cannot be resumed or replayed from documents, only from its JSON records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import takewhile
from json import dumps, loads
from pathlib import Path
from typing import Any

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.chat_messages import text_of
from ares_exp.llms.request import FrozenList, Message
from ares_exp.llms.wire import plain
from ares_exp.records.recorded_results import is_countable
from ares_exp.records.run_dir import dump_json
from ares_exp.trajectories.exports.atif_messages import (
    BASH,
    NEWEST_VERSION,
    OURS,
    action_calls,
    call_to_atif,
    content_to_atif,
    llm_calls,
    reply_message,
    result_of_message,
    step_of_message,
    with_own,
)
from ares_exp.trajectories.files.line_file import write_lines
from ares_exp.trajectories.records import (
    BROKEN,
    STEP_FIELDS,
    EpisodeTrajectory,
    StepRecord,
    conversation_of,
    deserialize_llm_response,
)

ATIF_SUFFIX = ".atif.json"
MAX_CONTEXT_CHARS = 10_000
REWRITTEN = (
    "The agent rewrote its history: the document marks these places, and contains the messages that were kept, with "
    "long texts shortened"
)
NO_CHAT = "Observations or actions that are not chat requests and responses were converted to JSON text"
OTHER_CONVERSATIONS = (
    "Steps of sub-agents and background requests are among the steps of the main conversation: `conversation` "
    "names the conversation of each step"
)
PARTS = "Parts of messages that ATIF does not support were replaced by text that names them"
SURROGATES = "Lone surrogates, which JSON text cannot contain, were replaced by U+FFFD"

_HEAD = ("task_name", "start_time", "end_time", "total_reward", "num_steps", "truncated", "outcome", "metadata")
_IN_METRICS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def to_atif(trajectory: EpisodeTrajectory) -> tuple[dict[str, Any], list[str]]:
    """Converts a trajectory to an ATIF document, which is JSON-ready.

    Also returns sentences that describe what the document cannot represent, such as a rewritten history. There are no
    sentences if the agent only appended chat messages. The field `notes` of the document contains the same sentences.
    """
    return _AtifWriter(trajectory).write()


def write_atif(path: Path, trajectory: EpisodeTrajectory) -> list[str]:
    """Writes the ATIF document of a trajectory to a file, atomically. Returns the sentences of `to_atif`."""
    document, dropped = to_atif(trajectory)
    write_lines(path, _lines(document))
    return dropped


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the JSON text of the document, with one line per step so that it is easier to read."""
    head = {name: value for name, value in document.items() if name != "steps"}
    yield f'{dump_json(head)[:-1]}, "steps": [\n'
    for number, step in enumerate(document["steps"]):
        yield f"{',' if number else ''}{dump_json(step)}\n"
    yield "]}\n"


class _AtifWriter:
    def __init__(self, trajectory: EpisodeTrajectory) -> None:
        self._trajectory = trajectory
        self._dropped: dict[str, None] = {}
        self._steps: list[dict[str, Any]] = []
        self._tools: dict[str, Any] = {}  # by their JSON text
        self._prompt: str | None = None
        self._conversation = MAIN_CONVERSATION  # of the previous request
        self._timestamp: str | None = None
        self._messages: Sequence[Mapping[str, Any]] = FrozenList()  # of the previous request
        self._shown: set[str] = set()  # every message shown so far, as JSON text

    def write(self) -> tuple[dict[str, Any], list[str]]:
        trajectory = self._trajectory
        for record in trajectory.steps:
            self._timestamp = iso_8601(record.timestamp)
            acted = self._act(record) if record.action is not None else None
            if record.observation is not None:
                self._observe(record.observation, acted)
        if not self._steps:  # a document needs at least one step
            self._emit({"source": "system", "message": ""})
        document = plain(self._document())
        text = dumps(document, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            self._dropped[SURROGATES] = None
            document = loads(text.encode(errors="surrogatepass").decode(errors="replace"))
        if self._dropped:
            document["notes"] = " ".join(f"{what}." for what in self._dropped)
        return document, list(self._dropped)

    def _document(self) -> dict[str, Any]:
        trajectory, metadata = self._trajectory, self._trajectory.metadata
        agent: dict[str, Any] = {
            "name": str(metadata.get("agent") or "unknown"),
            "version": str(metadata.get("agent_version") or metadata.get("ares_exp_version") or "unknown"),
        }
        models = [step["model_name"] for step in self._steps if "model_name" in step]
        if model := next(iter(models), metadata.get("model")):
            agent["model_name"] = str(model)
        if self._tools:
            agent["tool_definitions"] = list(self._tools.values())
        metrics = [step["metrics"] for step in self._steps if "metrics" in step]
        cached = sum(item.get("cached_tokens", 0) for item in metrics)
        head = {name: getattr(trajectory, name) for name in _HEAD}
        head["error"] = trajectory.error.to_dict() if trajectory.error is not None else None
        if trajectory.rewards:
            head["rewards"] = trajectory.rewards
        return {
            "schema_version": NEWEST_VERSION,
            "trajectory_id": trajectory.episode_id,
            "agent": agent,
            "steps": [{"step_id": number, **step} for number, step in enumerate(self._steps, 1)],
            "final_metrics": {
                **({"total_cached_tokens": cached} if cached else {}),
                "total_prompt_tokens": sum(item["prompt_tokens"] for item in metrics),
                "total_completion_tokens": sum(item["completion_tokens"] for item in metrics),
                "total_cost_usd": sum(item["cost_usd"] for item in metrics),
                "total_steps": len(self._steps),
            },
            "extra": {OURS: head},
        }

    def _act(self, record: StepRecord) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Writes the agent step of an action. Returns the step, and the chat message of the action if it has one."""
        commands = [asdict(command) for command in record.commands]
        ours: dict[str, Any] = {"record": {name: getattr(record, name) for name in STEP_FIELDS}}
        if record.background_requests:
            ours["record"]["background_requests"] = [one.to_dict() for one in record.background_requests]
        if self._conversation != MAIN_CONVERSATION:
            ours["conversation"] = self._conversation
        reply = None
        if (response := _response_fields(record.action)) is not None:
            fields, rest = response
            reply = reply_message(record.action or {})
            ours |= {"action": rest} if rest else {}
        else:
            self._dropped[NO_CHAT] = None
            fields = {"message": dumps(record.action, ensure_ascii=False)}
        if commands and (reply is None or "tool_calls" in fields):
            ours["commands"] = commands  # commands that run the LLM's tool calls, which are already in the step
        elif commands:
            fields["tool_calls"] = []
            for number, command in enumerate(commands, 1):
                call: dict[str, Any] = {"tool_call_id": f"command_{len(self._steps) + 1}_{number}"}
                call |= {"function_name": BASH, "arguments": {"command": command.pop("command")}}
                fields["tool_calls"].append(with_own(call, {"command": command}))
        step = with_own({"source": "agent", **fields}, ours)
        self._emit(step)
        return step, reply

    def _observe(
        self, observation: Mapping[str, Any], acted: tuple[dict[str, Any], dict[str, Any] | None] | None
    ) -> None:
        """Writes the messages of an observation that are not in an earlier step.

        Messages with outputs of the commands or tool calls in the preceding agent step become results of this step.
        `acted` is the preceding agent step with its chat message, as `_act` returned them; `None` without a preceding
        action.
        """
        lists = (observation.get("messages"), observation.get("tools", FrozenList()))
        are_lists = all(isinstance(items, FrozenList) and {Message}.issuperset(map(type, items)) for items in lists)
        if not (are_lists and isinstance(observation.get("system_prompt", ""), str)):
            self._dropped[NO_CHAT] = None
            self._emit({"source": "user", "message": dumps(observation, ensure_ascii=False)})
            return
        step, reply = acted if acted is not None else (None, None)
        before, self._conversation = self._conversation, conversation_of(observation)
        for tool in observation.get("tools", ()):
            self._tools.setdefault(dumps(tool), tool)
        if (prompt := observation.get("system_prompt")) is not None and prompt != self._prompt:
            self._prompt = prompt
            self._emit({"source": "system", "message": prompt})
        messages = observation["messages"]
        new = self._appended(messages, reply)
        if new is None:
            self._dropped[REWRITTEN if before == self._conversation else OTHER_CONVERSATIONS] = None
            shown = self._shown if reply is None else self._shown | {_key(reply)}
            new = [message for message in messages if _key(message) not in shown]
            self._tell_replacing(messages, new, None if before == self._conversation else self._conversation)
            step = None
        self._messages = messages
        self._shown.update(map(_key, new if reply is None else [*new, reply]))
        self._show(new, step)

    def _appended(
        self, messages: Sequence[Mapping[str, Any]], reply: Mapping[str, Any] | None
    ) -> Sequence[Mapping[str, Any]] | None:
        """Returns the messages after the messages of the previous request and its reply.

        Returns `None` if `messages` does not start with these messages, because the agent rewrote its history or
        switched to another conversation.
        """
        length = len(self._messages)
        if messages[:length] != self._messages:
            return None
        if reply is None:
            return messages[length:]
        kept = len(messages) > length and messages[length].get("role") == "assistant"
        return messages[length + 1 :] if kept else None

    def _tell_replacing(
        self, messages: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], conversation: str | None
    ) -> None:
        """Writes a step which states that the agent rewrote its history, or that it switched to `conversation`."""
        fresh = set(map(id, new))
        old = [message for message in messages if id(message) not in fresh]
        kept = "\n\n".join(f"[{message.get('role')}]\n{text_of(message.get('content'))}" for message in old)
        what = "rewrote its history" if conversation is None else f"continues its conversation {conversation}"
        self._emit(
            {
                "source": "system",
                "message": f"The agent {what}: it kept {len(old)} messages and added {len(new)}.",
                "observation": {"results": [{"content": _cut(kept)}]},
                "extra": {"context_management": {"type": "rewrite", "boundary": "replace"}},
            }
        )

    def _show(self, new: Sequence[Mapping[str, Any]], step: dict[str, Any] | None) -> None:
        """Writes each new message as a result of `step` if it is an output of its calls, otherwise as a new step."""
        if not all(map(_parts_fit, new)):
            self._dropped[PARTS] = None
        rest = list(new)
        if step is not None:
            rest = rest[self._show_results(rest, step) :]
        while rest:
            shown = step_of_message(rest.pop(0))
            self._emit(shown)
            if "tool_calls" in shown:
                rest = rest[self._show_results(rest, shown) :]

    def _show_results(self, messages: Sequence[Mapping[str, Any]], step: dict[str, Any]) -> int:
        """Adds the first messages to `step` as results if they are outputs of its calls. Returns their number."""
        calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
        if ids := {call[0] for call in llm_calls(step)}:
            shown = list(takewhile(lambda m: m.get("role") == "tool" and m.get("tool_call_id") in ids, messages))
            sources: list[str | None] = [message["tool_call_id"] for message in shown]
        else:
            shown = list(takewhile(lambda m: m.get("role") == "user", messages))[: len(calls)]
            sources = calls if len(shown) == len(calls) else [None] * len(shown)
        if shown:
            results = [result_of_message(m, source) for m, source in zip(shown, sources, strict=True)]
            step["observation"] = {"results": results}
        return len(shown)

    def _emit(self, step: dict[str, Any]) -> None:
        if self._timestamp is not None:
            step["timestamp"] = self._timestamp
        self._steps.append(step)


def _response_fields(action: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the ATIF fields of a response, and its fields that ATIF lacks; `None` if `action` is not a response."""
    try:
        pieces = action["data"]
        fields: dict[str, Any] = {
            "message": "".join(piece["content"] for piece in pieces if "content" in piece),
            "metrics": {
                "prompt_tokens": action["usage"]["prompt_tokens"],
                "completion_tokens": action["usage"]["generated_tokens"],
                "cost_usd": action["cost"],
                **({"cached_tokens": cached} if (cached := action["usage"].get("cached_tokens")) else {}),
                **{name: action[name] for name in _IN_METRICS if action.get(name) is not None},
            },
            "llm_call_count": 1,
        }
        if calls := action_calls(pieces):
            fields["tool_calls"] = [call_to_atif(*call) for call in calls]
        if action.get("model") is not None:
            fields["model_name"] = action["model"]
        rest = {key: action[key] for key in action if key not in ("data", "cost", "usage", "model", *_IN_METRICS)}
        thinking = (piece for piece in pieces if "thinking" in piece and not piece.get("redacted"))
        if text := "".join(piece["thinking"] for piece in thinking):
            fields["reasoning_content"] = text
        ids, logprobs = action.get("completion_token_ids"), action.get("logprobs")
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            rest["logprobs"] = fields["metrics"].pop("logprobs")
        if not is_countable(deserialize_llm_response(action)):
            return None
    except BROKEN:
        return None
    else:
        return plain(fields), rest


def _key(message: Mapping[str, Any]) -> str:
    return dumps(message, sort_keys=True)


def iso_8601(timestamp: float) -> str | None:
    """Formats epoch seconds in UTC. Returns `None` for values that are too large or not finite."""
    try:
        return datetime.fromtimestamp(timestamp, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def _parts_fit(message: Mapping[str, Any]) -> bool:
    """Returns whether ATIF supports each part of a message's content: a text, or an image with a URL."""
    content = message.get("content")
    if not isinstance(content, FrozenList):
        return True
    return all(
        shown["type"] == "image" or (isinstance(part, Mapping) and part.get("text") == shown["text"])
        for part, shown in zip(content, content_to_atif(content), strict=True)
        if isinstance(shown, Mapping)
    )


def _cut(text: str) -> str:
    if len(text) <= MAX_CONTEXT_CHARS:
        return text
    half = MAX_CONTEXT_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
