"""What a code agent did in its container between two time steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """One command that the agent ran.

    Attributes:
        command: As the agent gave it to the shell.
        exit_code: `None` when it was killed before it had one: by its time limit, or with the agent.
        duration_sec: Wall seconds.
        timed_out: Whether its own time limit killed it.
    """

    command: str
    exit_code: int | None
    duration_sec: float
    timed_out: bool = False


@dataclass(slots=True)
class Activity:
    """What happened in the container since the last time step.

    Attributes:
        container_sec: Wall seconds of calls of the container: its start and set-up, the agent's commands and transfers,
            the verifier. Concurrent calls count each.
        commands: The agent's commands that ended, in the order in which they did.
    """

    container_sec: float = 0.0
    commands: list[CommandRecord] = field(default_factory=list)

    def take(self) -> Activity:
        """What there is so far, as an object of its own; counting starts anew."""
        taken = Activity(self.container_sec, self.commands)
        self.container_sec, self.commands = 0.0, []
        return taken

    def add_command(self, command: CommandRecord) -> None:
        """Counts a command of the agent that has ended."""
        self.commands.append(command)
        self.container_sec += command.duration_sec

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts what happens inside as time of the container."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.container_sec += time.perf_counter() - began
