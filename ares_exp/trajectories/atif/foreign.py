"""Reads ATIF documents that somebody else wrote, as well as they can be read.

A record begins with each agent step that an LLM answered; what follows up to the next one is what the LLM is asked
then, after all that was before. System steps at the beginning are the system prompt. A step that says that the
context was replaced begins a new conversation with its observation. What a trajectory has no field for, but a document
has once, is kept in `metadata["atif"]`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ares_exp.llms.request import FrozenList, Message, freeze
from ares_exp.results import Outcome
from ares_exp.trajectories.atif.actions import action_from_atif
from ares_exp.trajectories.atif.messages import (
    content_to_atif,
    kept_reply,
    llm_calls,
    message_of_result,
    message_of_step,
)
from ares_exp.trajectories.files.conversations import MAX_REPEATED_MESSAGES
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

UNKNOWN_TASK = "unknown"

_ONCE = ("schema_version", "session_id", "notes", "continued_trajectory_ref", "final_metrics", "extra")
_DROPPED_OF_STEPS = {
    "reasoning_content": "The reasoning of agent steps has no place in a trajectory",
    "reasoning_effort": "The reasoning effort of agent steps has no place in a trajectory",
    "extra": "The `extra` of steps has no place in a trajectory",
}
_DROPPED_OF_METRICS = {
    "cached_tokens": "Counts of cached tokens have no place in a trajectory",
    "extra": "The `extra` of metrics has no place in a trajectory",
}
_LOGPROBS = "Log-probabilities of another number than the tokens were left out"
_MEDIA = "Images of agent steps, and recordings, have no place in a trajectory"
_SUBAGENTS = "Trajectories of subagents were left out"
_PARTS_EXTRA = "The `extra` of tool calls and results has no place in a trajectory"
_SEVERAL = "Agent steps of several LLM calls were read as one call"


class ForeignReader:
    """Reads one document, which is valid ATIF."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Reads nothing yet."""
        self._document = document
        self._dropped: dict[str, None] = {}
        self._records: list[StepRecord] = []
        self._open: dict[str, Any] = {"step_type": "FIRST", "action": None, "discount": None}
        self._messages: list[Message] = []
        self._after_reply: int | None = None  # how long the conversation was after the last reply
        self._prompt: list[str] = []
        self._begun = False
        self._repeated = 0
        times = [_epoch(step["timestamp"]) for step in document["steps"] if step.get("timestamp") is not None]
        self._start, self._end = (times[0], times[-1]) if times else (0.0, 0.0)
        self._now = self._start

    def read(self) -> tuple[EpisodeTrajectory, list[str]]:
        """The trajectory, and what it could not hold.

        Raises:
            ValueError, OverflowError, RecursionError: The document is absurdly long or deep.
        """
        if self._document.get("subagent_trajectories"):
            self._dropped[_SUBAGENTS] = None
        for step in self._document["steps"]:
            self._tell_dropped(step)
            if step.get("timestamp") is not None:
                self._now = _epoch(step["timestamp"])
            if _replaces_context(step):
                self._messages = []
                step = {**step, "message": None}
            self._read_step(_without_extra(step))
            self._begun |= step["source"] != "system"
        ended = self._after_reply == len(self._messages)
        self._close(last=ended)
        trajectory = EpisodeTrajectory(
            episode_id=self._episode_id(),
            task_name=UNKNOWN_TASK,
            steps=tuple(self._records),
            start_time=self._start,
            end_time=self._end,
            total_reward=None,
            num_steps=len(self._records),
            truncated=False,
            outcome=Outcome.COMPLETED if ended else Outcome.CLOSED,
            metadata=self._metadata(),
        )
        return trajectory, list(self._dropped)

    def _read_step(self, step: Mapping[str, Any]) -> None:
        if step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            self._act(step)
        elif step["message"] is None:
            pass  # of no interest to an LLM that is shown the observation
        elif step["source"] == "system" and not self._begun:
            self._prompt.append(_text(step["message"]))
        else:
            self._messages.append(freeze(message_of_step(step)))
        ids = {call[0] for call in llm_calls(step)}
        for result in (step.get("observation") or {"results": ()})["results"]:
            if result.get("content") is not None:
                self._messages.append(freeze(message_of_result(result, ids)))

    def _act(self, step: Mapping[str, Any]) -> None:
        self._close(last=False)
        action = action_from_atif(step)
        ids, logprobs = action.get("completion_token_ids"), action.get("logprobs")
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            self._dropped[_LOGPROBS] = None
            del action["logprobs"]
        self._open = {"step_type": "MID", "action": action, "discount": 1.0}
        self._messages.append(freeze(kept_reply(step, action)))
        self._after_reply = len(self._messages)

    def _close(self, *, last: bool) -> None:
        """Ends the record that is open; `last` where nothing came after its action."""
        observation: dict[str, Any] | None = None
        if last:
            self._open |= {"step_type": "LAST", "discount": 0.0}
        else:
            observation = {"messages": FrozenList(self._messages)}
            self._repeated += len(self._messages)
            if self._repeated > MAX_REPEATED_MESSAGES:
                raise ValueError(
                    f"expected at most {MAX_REPEATED_MESSAGES} messages in all requests together, got more"
                )
            if self._prompt:
                observation["system_prompt"] = "\n\n".join(self._prompt)
            if tools := self._document["agent"].get("tool_definitions"):
                observation["tools"] = tools
        self._open |= {"step_index": len(self._records), "timestamp": self._now, "observation": observation}
        self._records.append(StepRecord(reward=None, **self._open))

    def _tell_dropped(self, step: Mapping[str, Any]) -> None:
        metrics, calls = step.get("metrics") or {}, step.get("tool_calls") or ()
        results = (step.get("observation") or {"results": ()})["results"]
        told = [what for name, what in _DROPPED_OF_STEPS.items() if step.get(name) not in (None, {})]
        told += [what for name, what in _DROPPED_OF_METRICS.items() if metrics.get(name) not in (None, {})]
        if (step.get("llm_call_count") or 0) > 1:
            told.append(_SEVERAL)
        if any(part.get("extra") for part in (*calls, *results)):
            told.append(_PARTS_EXTRA)
        if any(result.get("subagent_trajectory_ref") for result in results):
            told.append(_SUBAGENTS)
        refused = ("image", "audio") if step["source"] != "user" else ("audio",)
        contents = [(step["message"], refused), *((result.get("content"), ("audio",)) for result in results)]
        if any(part["type"] in kinds for content, kinds in contents if isinstance(content, list) for part in content):
            told.append(_MEDIA)
        self._dropped.update(dict.fromkeys(told))

    def _episode_id(self) -> str:
        named = self._document.get("trajectory_id") or self._document.get("session_id")
        return named or hashlib.sha256(json.dumps(self._document).encode()).hexdigest()[:32]

    def _metadata(self) -> dict[str, Any]:
        agent = self._document["agent"]
        once = {name: self._document[name] for name in _ONCE if self._document.get(name) is not None}
        more = {name: agent[name] for name in ("model_name", "extra") if agent.get(name) is not None}
        kept = once | ({"agent": more} if more else {})
        return {"agent": agent["name"], "agent_version": agent["version"], **({"atif": kept} if kept else {})}


def _replaces_context(step: Mapping[str, Any]) -> bool:
    management = (step.get("extra") or {}).get("context_management")
    replaces = isinstance(management, Mapping) and management.get("boundary") == "replace"
    return replaces and step["source"] == "system"


def _without_extra(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step without what only `AtifReader` may heed, should the document be half of one of ours."""
    bare = {name: value for name, value in step.items() if name != "extra"}
    if step.get("tool_calls"):
        bare["tool_calls"] = [{**call, "extra": None} for call in step["tool_calls"]]
    if step.get("observation"):
        bare["observation"] = {"results": [{**result, "extra": None} for result in step["observation"]["results"]]}
    return bare


def _text(message: Any) -> str:
    content = content_to_atif(message)
    return content if isinstance(content, str) else "".join(part["text"] for part in content if "text" in part)


def _epoch(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
