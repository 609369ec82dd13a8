"""Running an agent again up to each of its steps, and comparing what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.agents.forbidden_calls import ForbiddenCalls
from ares_exp.containers.container import Container, ExecOptions, ExecResult
from ares_exp.environments.agent_host import AgentHost
from ares_exp.errors import DivergenceError, JournalError
from ares_exp.journal.encoding import decode_journal
from ares_exp.llms.request import LLMRequest
from ares_exp.trajectories.records import deserialize_llm_request, serialize_llm_request


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Where an agent waited for an answer, or had ended.

    Attributes:
        entries: How many journal entries there were.
        elapsed_sec: The agent's clock.
        open_calls: Numbers of the calls that it waited for.
        has_ended: Whether it had ended.
    """

    entries: int
    elapsed_sec: float
    open_calls: list[int]
    has_ended: bool


@dataclass(slots=True)
class Recording:
    """An episode of an agent.

    Attributes:
        instruction: What the agent was started on.
        started_at: Epoch seconds at which it began.
        seed: Seed of what it draws.
        lines: Its journal, encoded.
        steps: Its steps.
        originals: Its LLM requests, by the numbers of their calls.
    """

    instruction: str
    started_at: float
    seed: int
    lines: list[bytes] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    originals: dict[int, LLMRequest] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "instruction": self.instruction,
            "started_at": self.started_at,
            "seed": self.seed,
            "lines": [line.decode() for line in self.lines],
            "steps": [[step.entries, step.elapsed_sec, step.open_calls, step.has_ended] for step in self.steps],
            "originals": {str(number): serialize_llm_request(one) for number, one in self.originals.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """What `to_dict` gave."""
        return cls(
            data["instruction"],
            data["started_at"],
            data["seed"],
            [line.encode() for line in data["lines"]],
            [RecordedStep(*step) for step in data["steps"]],
            {int(number): deserialize_llm_request(one) for number, one in data["originals"].items()},
        )


async def run_again(factory: CodeAgentFactory, recording: Recording, step: int, *, package: str) -> None:
    """Runs a new agent up to a step.

    Args:
        factory: Makes it.
        recording: What it has to do.
        step: Up to here.
        package: See `ForbiddenCalls`.

    Raises:
        JournalError: It did something else, or could have.
    """
    recorded = recording.steps[step]
    journal = decode_journal(
        recording.lines[: recorded.entries], started_at=recording.started_at, seed=recording.seed, where="the journal"
    )
    host = AgentHost(cast("Container", Untouchable()), journal)
    forbidden = ForbiddenCalls(package)
    try:
        with forbidden:
            host.restore(
                factory,
                recording.instruction,
                timeout_sec=None,
                elapsed_sec=recorded.elapsed_sec,
                originals=recording.originals,
            )
        _compare(host, recorded)
        if forbidden.found:
            raise DivergenceError(
                "The agent calls what gives another value every time, and that has not reached what it asks for yet, "
                "or was the same by chance. Have it call `time.time()`, `random.random()`, `uuid.uuid4()` and the like."
            )
    except JournalError as error:
        raise type(error)(f"Step {step}: {error}{forbidden}") from None
    finally:
        await host.cancel()


def _compare(host: AgentHost, recorded: RecordedStep) -> None:
    if host.runtime.has_ended and not recorded.has_ended:
        raise DivergenceError("The agent, run again, has ended, where it waited for an answer.")
    if recorded.has_ended and not host.runtime.has_ended:
        raise DivergenceError("The agent, run again, waits for something, where it had ended.")
    if host.runtime.open_calls != recorded.open_calls:
        raise DivergenceError(
            f"The agent, run again, waits for its calls {host.runtime.open_calls}, where it waited for "
            f"{recorded.open_calls}."
        )


class Untouchable:
    """The container of an agent that is run again: nothing is to be carried out."""

    async def exec(self, command: str, **_: Unpack[ExecOptions]) -> ExecResult:
        """Is not called."""
        raise AssertionError(f"run again: {command}")

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """Is not called."""
        raise AssertionError(f"uploaded again: {source}")

    async def download(self, source: str | Path, target: str | Path) -> None:
        """Is not called."""
        raise AssertionError(f"downloaded again: {source}")
