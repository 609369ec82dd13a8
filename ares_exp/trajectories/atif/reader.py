"""The common core of ATIF documents, read as a trajectory: of any maker, any version.

A record begins with each agent step that an LLM answered; what follows up to the next one is what the LLM is asked
then, after all that was before. System steps at the beginning are the system prompt. A step that says that the
context was replaced begins a new conversation with its observation. What a trajectory has no field for, but a document
has once, is kept in `metadata["atif"]`. Of a document that was written here, reward, seconds, commands and outcome are
read too, but not the exact requests: sampling settings and rewritten histories are in the JSON record alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import FrozenList, Message, freeze
from ares_exp.records.results import Outcome
from ares_exp.trajectories.atif.messages import (
    OURS,
    content_from_atif,
    llm_calls,
    message_of_result,
    message_of_step,
    own,
    reply_message,
)
from ares_exp.trajectories.atif.schema import validate_atif
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.conversations import MAX_REPEATED_MESSAGES
from ares_exp.trajectories.files.line_file import read_lines, read_rest
from ares_exp.trajectories.files.schema_versions import whole_episode
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

UNKNOWN_TASK = "unknown"

_ONCE = ("schema_version", "session_id", "notes", "continued_trajectory_ref", "final_metrics", "extra")
_OF_THE_EPISODE = ("task_name", "start_time", "end_time", "total_reward", "truncated", "outcome", "error")
_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def load_atif(path: Path) -> tuple[EpisodeTrajectory, list[str]]:
    """Reads a document's file; see `from_atif`.

    Raises:
        TrajectoryFormatError: The file is missing, no JSON, or no valid document; the message names the path.
    """
    try:
        with read_lines(path) as lines:
            document = json.loads(read_rest(lines))
        return from_atif(document)
    except TrajectoryFormatError as error:
        raise TrajectoryFormatError(f"{path}: {error}") from error
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}.") from error
    except BROKEN as error:
        raise TrajectoryFormatError(f"{path}: {what_broke(error)}.") from error


def from_atif(document: Any) -> tuple[EpisodeTrajectory, list[str]]:
    """Reads a parsed document.

    Returns:
        The trajectory, and in a sentence each what of the document it could not hold.

    Raises:
        TrajectoryFormatError: It is no valid ATIF document, or broken where this package adds to it.
    """
    validate_atif(document)
    try:
        return _AtifReader(document).read(), list(dict.fromkeys(_not_held(document)))
    except (OverflowError, *BROKEN) as error:
        raise TrajectoryFormatError(
            f"Expected an ATIF document, got one that is broken: {what_broke(error)}."
        ) from error


class _AtifReader:
    """Reads one document, which is valid ATIF."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._records: list[StepRecord] = []
        first = own(document).get("first", {}).get("record", {})  # of a document that was written here
        self._open: dict[str, Any] = {"step_type": "FIRST", "action": None, "discount": None, **first}
        self._messages: list[Message] = []
        self._answered = -1  # how many messages there were after the last reply
        self._prompt: list[str] = []
        self._repeated = 0
        times = [_epoch(step["timestamp"]) for step in document["steps"] if step.get("timestamp") is not None]
        self._start, self._end = (times[0], times[-1]) if times else (0.0, 0.0)
        self._now = self._start

    def read(self) -> EpisodeTrajectory:
        begun = False
        for step in self._document["steps"]:
            acts = step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0
            if acts:
                self._close(last=False, lane=own(step).get("lane"))
            if step.get("timestamp") is not None:
                self._now = _epoch(step["timestamp"])
            if replaced := _replaces_context(step):
                self._messages = []
            if acts:
                self._act(step)
            elif step["source"] == "system" and not begun and not replaced:
                self._prompt.append(_text(step["message"]))
            elif not replaced:  # else the message is of no interest to an LLM that is shown the observation
                self._messages.append(freeze(message_of_step(step)))
            ids = {call[0] for call in llm_calls(step)}
            for result in (step.get("observation") or {"results": ()})["results"]:
                if result.get("content") is not None:
                    self._messages.append(freeze(message_of_result(result, ids)))
            begun |= step["source"] != "system"
        ended = self._answered == len(self._messages)
        self._close(last=ended)
        ours = own(self._document)
        if ours.get("num_steps") == 0:  # its `reset()` failed
            self._records = []
        known = {
            name: ours[name] for name in (*_OF_THE_EPISODE, "metadata", "rewards", "unfinished_step") if name in ours
        }
        read = {
            "episode_id": self._episode_id(),
            "task_name": UNKNOWN_TASK,
            "start_time": self._start,
            "end_time": self._end,
            "total_reward": None,
            "truncated": False,
            "outcome": Outcome.COMPLETED if ended else Outcome.CLOSED,
            "error": None,
            "metadata": self._metadata(),
        }
        return whole_episode({**read, **known, "num_steps": len(self._records)}, self._records)

    def _act(self, step: Mapping[str, Any]) -> None:
        action, ours = _action(step), own(step)
        commands = [
            {**own(call)["command"], "command": call["arguments"]["command"]}
            for call in step.get("tool_calls") or ()
            if "command" in own(call)
        ]
        self._open = {**ours.get("record", {}), "action": action, "commands": commands or ours.get("commands", ())}
        self._messages.append(freeze(reply_message(action)))
        self._answered = len(self._messages)

    def _close(self, *, last: bool, lane: Any = None) -> None:
        """Ends the record that is open; `last` where nothing came after its action. `lane` is that of its request."""
        kind = self._open.setdefault("step_type", "LAST" if last else "MID")
        observation: dict[str, Any] | None = None
        if kind != "LAST":
            self._repeated += len(self._messages)
            if self._repeated > MAX_REPEATED_MESSAGES:
                raise ValueError(
                    f"expected at most {MAX_REPEATED_MESSAGES} messages in all requests together, got more"
                )
            observation = {"messages": FrozenList(self._messages)}
            if self._prompt:
                observation["system_prompt"] = "\n\n".join(self._prompt)
            if tools := self._document["agent"].get("tool_definitions"):
                observation["tools"] = tools
            if isinstance(lane, str):
                observation["origin"] = {"lane": lane}
        defaults = {"reward": None, "discount": 0.0 if kind == "LAST" else 1.0, "timestamp": self._now}
        more = {"step_index": len(self._records), "observation": observation}
        self._records.append(StepRecord.from_dict({**defaults, **self._open, **more}))

    def _episode_id(self) -> str:
        named = self._document.get("trajectory_id") or self._document.get("session_id")
        return named or hashlib.sha256(json.dumps(self._document).encode()).hexdigest()[:32]

    def _metadata(self) -> dict[str, Any]:
        agent = self._document["agent"]
        once = {name: self._document[name] for name in _ONCE if self._document.get(name) is not None}
        more = {name: agent[name] for name in ("model_name", "extra") if agent.get(name) is not None}
        kept = once | ({"agent": more} if more else {})
        return {"agent": agent["name"], "agent_version": agent["version"], **({"atif": kept} if kept else {})}


def _action(step: Mapping[str, Any]) -> dict[str, Any]:
    metrics, text, calls = step.get("metrics") or {}, _text(step["message"]), llm_calls(step)
    ours = dict(own(step).get("action", {}))
    reasoning = step.get("reasoning_content")
    cached = metrics.get("cached_tokens")
    action: dict[str, Any] = {
        "data": [
            *ours.pop("thinking", [{"thinking": reasoning}] if reasoning else []),
            *([{"content": text}] if text or not calls else []),
            *({"id": call_id, "name": name, "arguments": arguments} for call_id, name, arguments in calls),
        ],
        "cost": metrics.get("cost_usd") or 0.0,
        "usage": {
            "prompt_tokens": metrics.get("prompt_tokens") or 0,
            "generated_tokens": metrics.get("completion_tokens") or 0,
            **({"cached_tokens": cached} if cached else {}),
        },
    }
    action |= {name: metrics[name] for name in _TOKENS if metrics.get(name) is not None}
    if _unequal_lengths(metrics):
        del action["logprobs"]
    model = {"model": step["model_name"]} if step.get("model_name") is not None else {}
    return {**action, **model, **ours}


def _not_held(document: Mapping[str, Any]) -> Iterator[str]:
    """Says what of a document a trajectory has no place for."""
    if document.get("subagent_trajectories"):
        yield "Trajectories of subagents are left out"
    for step in document["steps"]:
        metrics, results = step.get("metrics") or {}, (step.get("observation") or {"results": ()})["results"]
        if step.get("reasoning_effort") is not None:
            yield "The `reasoning_effort` of agent steps is left out"
        if (step.get("llm_call_count") or 0) > 1:
            yield "Agent steps of several LLM calls are read as one call"
        if _unequal_lengths(metrics):
            yield "Log-probabilities of another number than the tokens are left out"
        if any(_foreign_extra(part) for part in (step, metrics, *(step.get("tool_calls") or ()), *results)):
            yield "The `extra` of steps is left out"
        if own(step).get("settings"):
            yield "Sampling settings are left out"
        if _replaces_context(step):
            yield "Rewritten histories are read as the document shows them"
        if any(result.get("subagent_trajectory_ref") for result in results):
            yield "Trajectories of subagents are left out"
        contents = [step["message"], *(result.get("content") for result in results)]
        parts = [part["type"] for content in contents if isinstance(content, list) for part in content]
        if "audio" in parts or (step["source"] == "agent" and "image" in parts):
            yield "Recordings, and images of agent steps, are left out"


def _foreign_extra(part: Mapping[str, Any]) -> bool:
    return bool((part.get("extra") or {}).keys() - {OURS, "context_management"})


def _unequal_lengths(metrics: Mapping[str, Any]) -> bool:
    ids, logprobs = metrics.get("completion_token_ids"), metrics.get("logprobs")
    return ids is not None and logprobs is not None and len(ids) != len(logprobs)


def _replaces_context(step: Mapping[str, Any]) -> bool:
    management = (step.get("extra") or {}).get("context_management")
    replaces = isinstance(management, Mapping) and management.get("boundary") == "replace"
    return replaces and step["source"] == "system"


def _text(message: Any) -> str:
    content = content_from_atif(message)
    return content if isinstance(content, str) else "".join(part["text"] for part in content if "text" in part)


def _epoch(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
