"""Reads back the ATIF documents that `atif_writer` makes: their trajectories, exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ares_exp.llms.request import Message, freeze
from ares_exp.trajectories.atif.actions import action_from_atif
from ares_exp.trajectories.atif.messages import kept_reply, llm_calls, message_of_result, message_of_step, own
from ares_exp.trajectories.files.conversations import MAX_REPEATED_MESSAGES
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, episode_fields


class AtifReader:
    """Reads one document, which is valid ATIF and has our `extra`."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Reads nothing yet."""
        self._document = document
        self._head = own(document)
        self._records: list[StepRecord] = []
        self._open: dict[str, Any] | None = None  # the record whose observation is being read
        self._settings: Mapping[str, Any] = {}
        self._prompt: Any = None
        self._foreign: Any = None
        self._table: list[Message] = []
        self._conversation: list[int] = []
        self._since = 0
        self._history: list[list[int]] | None = None
        self._repeated = 0

    def read(self) -> EpisodeTrajectory:
        """The trajectory.

        Raises:
            KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError: What the document has under
                `extra.ares_exp` is not what was written there.
        """
        if "first" in self._head:
            first = self._head["first"]
            self._settings = self._head["settings"]
            self._open = {**first["record"], "action": first.get("action"), "commands": first.get("commands", ())}
            self._open["observed"] = first.get("observed", True)
        for step in self._document["steps"]:
            ours = own(step)
            if "record" in ours:
                self._close()
                self._act(step, ours)
            elif "system_prompt" in ours:
                self._prompt = step["message"]
            elif "history" in ours:
                self._history = ours["history"]
            elif ours.get("json"):
                self._foreign = json.loads(step["message"])
            elif "empty" not in ours:
                self._table.append(freeze(message_of_step(step)))
                self._take_results(step)
        self._close()
        names = ("task_name", "start_time", "end_time", "total_reward", "num_steps", "truncated", "outcome", "error")
        fields = {name: self._head[name] for name in (*names, "metadata")}
        fields["unfinished_step"] = self._head.get("unfinished_step")
        return EpisodeTrajectory(
            steps=tuple(self._records),
            **episode_fields({**fields, "episode_id": self._document["trajectory_id"]}),
        )

    def _act(self, step: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        action = action_from_atif(step)
        if not ours.get("json"):
            self._table.append(freeze(kept_reply(step, action)))
        self._take_results(step)
        calls = [call for call in step.get("tool_calls") or () if "command" in own(call)]
        commands = [{**own(call)["command"], "command": call["arguments"]["command"]} for call in calls]
        self._settings = ours.get("settings", self._settings)
        self._open = {**ours["record"], "action": action, "commands": commands or ours.get("commands", ())}
        self._open["observed"] = ours.get("observed", True)

    def _take_results(self, step: Mapping[str, Any]) -> None:
        ids = {call[0] for call in llm_calls(step)}
        results = (step.get("observation") or {"results": ()})["results"]
        self._table.extend(freeze(message_of_result(result, ids)) for result in results)

    def _close(self) -> None:
        """Ends the open record: all that its observation shows has been read."""
        if self._open is None:
            return
        observation = None
        if self._open["observed"]:
            observation = self._request() if self._foreign is None else self._foreign
        self._foreign = None
        self._records.append(StepRecord.from_dict({**self._open, "observation": observation}))
        self._open = None

    def _request(self) -> dict[str, Any]:
        if self._history is None:
            self._conversation = [*self._conversation, *range(self._since, len(self._table))]
        else:
            self._conversation = self._numbers(self._history)
        self._history, self._since = None, len(self._table)
        self._count(len(self._conversation))
        request: dict[str, Any] = {"messages": [self._table[number] for number in self._conversation]}
        for name, value in self._settings.items():
            if name == "system_prompt":
                request[name] = self._prompt
            elif name == "tools":
                definitions = self._document["agent"].get("tool_definitions") or ()
                request[name] = [definitions[index] for index in value]
            else:
                request[name] = value
        return request

    def _numbers(self, ranges: list[list[int]]) -> list[int]:
        for start, stop in ranges:
            if not (type(start) is type(stop) is int and 0 <= start < stop <= len(self._table)):
                raise ValueError(
                    f"expected message ranges within {len(self._table)}, got [{start!r:.80}, {stop!r:.80})"
                )
            self._count(stop - start)
        return list(chain.from_iterable(range(start, stop) for start, stop in ranges))

    def _count(self, messages: int) -> None:
        self._repeated += messages
        if self._repeated > MAX_REPEATED_MESSAGES:
            raise ValueError(f"expected at most {MAX_REPEATED_MESSAGES} messages in all requests together, got more")
