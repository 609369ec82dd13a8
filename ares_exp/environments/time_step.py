"""Time steps: what an environment returns from `reset()` and `step()` (the dm_env contract)."""

from __future__ import annotations

from typing import Any, Generic, Literal, NamedTuple, TypeVar

StepType = Literal["FIRST", "MID", "LAST"]
ObservationT = TypeVar("ObservationT", covariant=True)
T = TypeVar("T")


class TimeStep(NamedTuple, Generic[ObservationT]):
    """One time step.

    Attributes:
        step_type: `"FIRST"` from `reset()`, `"MID"` while the episode goes on, `"LAST"` when it has ended.
        reward: `None` on FIRST; 0.0 on MID unless the task gives one; the episode's reward on LAST.
            `None` on LAST only when the verifier did not run (`verify_on_truncation=false`).
        discount: `None` on FIRST; 1.0 on MID; on LAST 0.0 for termination and 1.0 for truncation.
        observation: The pending LLM request; `None` on LAST.
    """

    step_type: StepType
    reward: float | None
    discount: float | None
    observation: ObservationT | None

    def first(self) -> bool:
        """Whether this step opens an episode."""
        return self.step_type == "FIRST"

    def mid(self) -> bool:
        """Whether the episode goes on."""
        return self.step_type == "MID"

    def last(self) -> bool:
        """Whether this step ends an episode."""
        return self.step_type == "LAST"


def restart(observation: T) -> TimeStep[T]:
    """The FIRST step of an episode."""
    return TimeStep("FIRST", None, None, observation)


def transition(observation: T, reward: float = 0.0) -> TimeStep[T]:
    """A MID step: the episode goes on."""
    return TimeStep("MID", reward, 1.0, observation)


def termination(reward: float) -> TimeStep[Any]:
    """The LAST step of an episode that came to its own end."""
    return TimeStep("LAST", reward, 0.0, None)


def truncation(reward: float | None) -> TimeStep[Any]:
    """The LAST step of an episode that a limit cut short."""
    return TimeStep("LAST", reward, 1.0, None)
