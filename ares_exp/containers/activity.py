"""Records of an agent's work in its container between two time steps: its commands, LLM requests and container time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.validation import Flag, Integer, Number, Text


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """A finished command of the agent.

    Attributes:
        command: Shell source text that the agent sent.
        exit_code: Exit status, or `None` if the command was killed by its time limit or because the agent was killed.
        duration_sec: Wall-clock seconds.
        timed_out: Whether the time limit killed the command.
    """

    command: Text
    exit_code: Integer | None
    duration_sec: Number
    timed_out: Flag = False


@dataclass(frozen=True, slots=True)
class BackgroundRequest:
    """An LLM request that the policy answered without a time step, for example for a title of the conversation."""

    request: LLMRequest
    response: LLMResponse


@dataclass(slots=True)
class Activity:
    """Measurements of the agent's work in the container since the last time step.

    Attributes:
        container_sec: Total wall-clock seconds of all container calls: for start, set-up, the agent's commands, file
            transfers and the verifier. The times of concurrent calls are added.
        commands: Finished commands of the agent, in the order in which they ended.
        background_requests: LLM requests of the agent that the policy answered without a time step, in the order of the
            responses.
    """

    container_sec: float = 0.0
    commands: list[CommandRecord] = field(default_factory=list)
    background_requests: list[BackgroundRequest] = field(default_factory=list)

    def take(self) -> Activity:
        """Returns the current values as a new object and resets this object."""
        taken = Activity(self.container_sec, self.commands, self.background_requests)
        self.container_sec, self.commands, self.background_requests = 0.0, [], []
        return taken

    def add_command(self, command: CommandRecord) -> None:
        """Appends a finished command of the agent, and adds the command's duration to the container time."""
        self.commands.append(command)
        self.container_sec += command.duration_sec

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the duration of the `with` block to the container time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.container_sec += time.perf_counter() - started
