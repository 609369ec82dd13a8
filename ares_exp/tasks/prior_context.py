"""`trajectory.json` of a task: a conversation that its agent continues, as an ATIF document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ares_exp.errors import TaskError, TrajectoryFormatError

TRAJECTORY = "trajectory.json"


def read_prior_context(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Reads the messages of the conversation, oldest first; empty when there is no such file. Blocking.

    System steps at its beginning are left out: they are the prompt of the agent that it was recorded with.

    Raises:
        TaskError: The file is no valid ATIF document, or shows no conversation.
    """
    if not path.is_file():
        return ()
    from ares_exp.trajectories.atif.reader import load_atif

    try:
        trajectory, _ = load_atif(path)
    except TrajectoryFormatError as error:
        raise TaskError(f"{error} (The task's prior context has to be a valid ATIF document.)") from None
    observed = [number for number, step in enumerate(trajectory.steps) if _shows_messages(step.observation)]
    if not observed:
        raise TaskError(f"{path}: expected an ATIF document of a conversation, found no message in it.")
    last = trajectory.steps[observed[-1]].observation
    assert last is not None
    answers = [_reply(step.action) for step in trajectory.steps[observed[-1] + 1 :] if step.action is not None]
    return (*last["messages"], *answers)


def _shows_messages(observation: Mapping[str, Any] | None) -> bool:
    return observation is not None and "messages" in observation


def _reply(action: Mapping[str, Any]) -> Mapping[str, Any]:
    from ares_exp.llms.request import freeze
    from ares_exp.trajectories.atif.messages import reply_message

    message: Mapping[str, Any] = freeze(reply_message(action))
    return message
