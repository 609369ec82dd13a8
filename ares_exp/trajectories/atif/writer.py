"""Makes an ATIF document of a trajectory; `atif` tells how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import takewhile
from json import dumps
from typing import Any

from ares_exp.llms.request import FrozenList, Message, freeze
from ares_exp.llms.wire import plain
from ares_exp.trajectories.atif.actions import action_to_atif
from ares_exp.trajectories.atif.history import Placed, ShownMessages
from ares_exp.trajectories.atif.messages import (
    BASH,
    OURS,
    content_from_atif,
    content_to_atif,
    kept_reply,
    llm_calls,
    reply_difference,
    result_of_message,
    step_of_message,
    with_own,
)
from ares_exp.trajectories.atif.schema import NEWEST_VERSION
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

OURS_VERSION = 1
MAX_CONTEXT_CHARS = 10_000
REWRITTEN = (
    "The agent rewrote its history: other readers than ares_exp see that it did and what it kept (long texts cut), the "
    "exact requests are in `extra.ares_exp` alone"
)
NO_CHAT = "Observations or actions that are no chat requests and answers became JSON text"
PARTS = "Parts of messages that ATIF has no place for are in `extra.ares_exp` alone"
SURROGATES = "Half surrogate pairs, which no JSON text can hold, became replacement characters"


class AtifWriter:
    """Makes one document."""

    def __init__(self, trajectory: EpisodeTrajectory) -> None:
        """Makes nothing yet."""
        self._trajectory = trajectory
        self._dropped: dict[str, None] = {}
        self._steps: list[dict[str, Any]] = []
        self._tools: dict[str, tuple[int, Any]] = {}  # by their JSON text
        self._settings: dict[str, Any] = {}
        self._prompt: str | None = None
        self._timestamp: str | None = None
        self._shown = ShownMessages()

    def write(self) -> tuple[dict[str, Any], list[str]]:
        """The document, and what it could not hold."""
        trajectory = self._trajectory
        head: dict[str, Any] = {"version": OURS_VERSION}
        for record in trajectory.steps:
            self._timestamp = _iso_8601(record.timestamp)
            if "first" not in head:
                head["first"] = self._first(record)
                head["settings"] = dict(self._settings)
            else:
                self._act(record)
        if not self._steps:  # a document has at least one
            self._emit(with_own({"source": "system", "message": ""}, {"empty": True}))
        for name in ("task_name", "start_time", "end_time", "total_reward", "num_steps", "truncated"):
            head[name] = getattr(trajectory, name)
        head["outcome"] = trajectory.outcome.value
        head["error"] = asdict(trajectory.error) if trajectory.error is not None else None
        head["metadata"] = trajectory.metadata
        if trajectory.unfinished_step is not None:
            head["unfinished_step"] = trajectory.unfinished_step.to_dict()
        document = plain(self._document(head))
        try:
            dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self._dropped[SURROGATES] = None
            document = _without_surrogates(document)
        if self._dropped:
            document["notes"] = " ".join(f"{what}." for what in self._dropped)
        return document, list(self._dropped)

    def _document(self, head: dict[str, Any]) -> dict[str, Any]:
        metadata = self._trajectory.metadata
        version = metadata.get("agent_version") or metadata.get("ares_exp_version")
        agent: dict[str, Any] = {
            "name": str(metadata.get("agent") or "unknown"),
            "version": str(version or "unknown"),
        }
        if models := [step["model_name"] for step in self._steps if "model_name" in step]:
            agent["model_name"] = models[0]
        if self._tools:
            agent["tool_definitions"] = [tool for _, tool in self._tools.values()]
        metrics = [step["metrics"] for step in self._steps if "metrics" in step]
        return {
            "schema_version": NEWEST_VERSION,
            "trajectory_id": self._trajectory.episode_id,
            "agent": agent,
            "steps": [{"step_id": number, **step} for number, step in enumerate(self._steps, 1)],
            "final_metrics": {
                "total_prompt_tokens": sum(item["prompt_tokens"] for item in metrics),
                "total_completion_tokens": sum(item["completion_tokens"] for item in metrics),
                "total_cost_usd": sum(item["cost_usd"] for item in metrics),
                "total_steps": len(self._steps),
            },
            "extra": {OURS: head},
        }

    def _first(self, record: StepRecord) -> dict[str, Any]:
        first: dict[str, Any] = {"record": _record_fields(record)}
        if record.commands:
            first["commands"] = [asdict(command) for command in record.commands]
        if record.action is not None:
            first["action"] = record.action
        if record.observation is None:
            first["observed"] = False
        else:
            self._observe(record.observation, reply=None, results_of=None)
        return first

    def _act(self, record: StepRecord) -> None:
        """The agent step of an action, and what the agent saw next."""
        fields, ours = action_to_atif(record.action)
        ours["record"] = _record_fields(record)
        step = {"source": "agent", **fields}
        commands = [asdict(command) for command in record.commands]
        if "json" in ours:
            self._dropped[NO_CHAT] = None
        if commands and ("json" in ours or "tool_calls" in step):
            ours["commands"] = commands  # of the calls that the LLM made: as calls they would be there twice
        elif commands:
            step["tool_calls"] = [
                _command_call(f"command_{len(self._steps) + 1}_{number}", command)
                for number, command in enumerate(commands, 1)
            ]
        reply = None if "json" in ours or record.action is None else kept_reply(step, record.action)
        if record.observation is None:
            ours["observed"] = False
        self._emit(step)
        if reply is not None:
            self._shown.add_reply()
        if record.observation is not None:
            ours |= self._observe(record.observation, reply=reply, results_of=step)
        step |= with_own({}, ours)

    def _observe(
        self, observation: Mapping[str, Any], *, reply: Mapping[str, Any] | None, results_of: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Shows an observation; returns what the agent step before has to say of it."""
        if not _is_request(observation):
            self._dropped[NO_CHAT] = None
            text = dumps(observation, ensure_ascii=False)
            self._emit(with_own({"source": "user", "message": text}, {"json": True}))
            return {}
        ours = self._set(observation)
        placed = self._shown.place(observation["messages"], reply)
        if reply is not None and placed.kept_reply is not None:
            ours |= reply_difference(reply, placed.kept_reply)
        if placed.history is not None:
            self._dropped[REWRITTEN] = None
            self._tell_rewriting(placed)
            results_of = None
        self._show(placed.new, results_of)
        return ours

    def _set(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a request's other fields; returns what there is to say of those that changed."""
        stored: dict[str, Any] = {}
        for name, value in observation.items():
            if name == "tools":
                stored[name] = [self._tool(tool) for tool in value]
            elif name == "system_prompt":
                stored[name] = True
                if value != self._prompt:
                    self._prompt = value
                    self._emit(with_own({"source": "system", "message": value}, {"system_prompt": True}))
            elif name != "messages":
                stored[name] = value
        if stored == self._settings:
            return {}
        self._settings = stored
        return {"settings": stored}

    def _tool(self, tool: Mapping[str, Any]) -> int:
        return self._tools.setdefault(dumps(tool), (len(self._tools), tool))[0]

    def _tell_rewriting(self, placed: Placed) -> None:
        kept = "\n\n".join(f"[{message.get('role')}]\n{_text(message)}" for message in placed.old)
        message = f"The agent rewrote its history: it kept {len(placed.old)} messages and has {len(placed.new)} new."
        step = {
            "source": "system",
            "message": message,
            "observation": {"results": [{"content": _cut(kept)}]},
            "extra": {
                "context_management": {"type": "rewrite", "boundary": "replace"},
                OURS: {"history": placed.history},
            },
        }
        self._emit(step)

    def _show(self, new: Sequence[Mapping[str, Any]], step: dict[str, Any] | None) -> None:
        """Shows new messages: as results of `step` those that answer its calls, the others as steps."""
        if not all(map(_parts_fit, new)):
            self._dropped[PARTS] = None
        rest = list(new)
        if step is not None:
            rest = rest[self._show_results(rest, step) :]
        for number, message in enumerate(rest):
            shown = step_of_message(message)
            self._emit(shown)
            if shown["source"] == "agent" and "tool_calls" in shown:
                taken = self._show_results(rest[number + 1 :], shown)
                self._show(rest[number + 1 + taken :], None)
                return

    def _show_results(self, messages: Sequence[Mapping[str, Any]], step: dict[str, Any]) -> int:
        """Shows the first few of `messages` as results of `step`; returns how many."""
        ids = {call[0] for call in llm_calls(step)}
        calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
        if ids:
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


def _record_fields(record: StepRecord) -> dict[str, Any]:
    names = ("step_index", "step_type", "reward", "discount", "timestamp")
    seconds = ("policy_sec", "environment_sec", "container_sec")
    values = {name: getattr(record, name) for name in (*names, *seconds)}
    return {name: value for name, value in values.items() if name in names or value is not None}


def _command_call(call_id: str, command: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in command.items() if name != "command"}
    call = {"tool_call_id": call_id, "function_name": BASH, "arguments": {"command": command["command"]}}
    return with_own(call, {"command": rest})


def _is_request(observation: Mapping[str, Any]) -> bool:
    lists = (observation.get("messages"), observation.get("tools", FrozenList()))
    are_lists = all(isinstance(items, FrozenList) and {Message}.issuperset(map(type, items)) for items in lists)
    return are_lists and isinstance(observation.get("system_prompt", ""), str)


def _iso_8601(timestamp: float) -> str | None:
    try:
        return datetime.fromtimestamp(timestamp, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def _parts_fit(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return not isinstance(content, FrozenList) or freeze(content_from_atif(content_to_atif(content))) == content


def _text(message: Mapping[str, Any]) -> str:
    content = content_to_atif(message.get("content"))
    return content if isinstance(content, str) else "".join(part.get("text", "[image]") for part in content)


def _cut(text: str) -> str:
    if len(text) <= MAX_CONTEXT_CHARS:
        return text
    half = MAX_CONTEXT_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="surrogatepass").decode(errors="replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value
