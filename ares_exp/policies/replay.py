"""The replay policy: answers from a recorded episode, and says where a request differs from the recorded one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import validate_call

from ares_exp.errors import PreflightError, ReplayDivergenceError, TrajectoryFormatError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.oracle import ORACLE_MODEL
from ares_exp.policies.policy import EpisodeSpec, SharedPolicy
from ares_exp.trajectories.first_difference import Difference, first_difference
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_response, serialize_llm_request
from ares_exp.trajectories.stored_episodes import load

SHOWN_CHARS = 120


class ReplayPolicy(SharedPolicy):
    """Plays recorded episodes again, each request compared with the recorded one before it is answered."""

    @validate_call
    def __init__(self, *, trajectory: Path, strict: bool = True) -> None:
        """Names the recording; reads nothing yet.

        Args:
            trajectory: A run directory, or a file or a folder of episodes, of any format; see `trajectories.load`.
            strict: Whether a request that differs from the recorded one ends the episode; if not, it is answered all
                the same.
        """
        self._path = trajectory
        self._strict = strict
        self._episodes: dict[str, list[EpisodeTrajectory]] = {}

    async def preflight(self) -> None:
        """Reads the recording. Raises `PreflightError` when there is none, or when it cannot be read."""
        try:
            recorded = list(load(self._path).trajectories())
        except TrajectoryFormatError as error:
            raise PreflightError(f"Cannot read `policy.trajectory`: {error}") from None
        if not recorded:
            raise PreflightError(f"Expected recorded episodes in `policy.trajectory`, found none in {self._path}.")
        # What the oracle did can only be done again with the solution in place.
        self.needs_solution = any(_is_oracle(episode) for episode in recorded)
        self._episodes = {}
        for episode in recorded:
            self._episodes.setdefault(episode.task_name, []).append(episode)

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """The recording of that task; attempt n plays the n-th recorded one, starting over after the last."""
        recorded = self._episodes.get(episode.task_name)
        if not recorded:
            names = ", ".join(sorted(self._episodes)) or "none"
            raise ReplayDivergenceError(
                f"{self._path} has no recorded episode of task {episode.task_name!r}; it has: {names}. "
                "Select those with `env.tasks=…`."
            )
        return _Replayed(recorded[episode.attempt % len(recorded)], strict=self._strict)


def _is_oracle(episode: EpisodeTrajectory) -> bool:
    return any(step.action is not None and step.action.get("model") == ORACLE_MODEL for step in episode.steps)


class _Replayed:
    """One recorded episode, played from its first action."""

    def __init__(self, episode: EpisodeTrajectory, *, strict: bool) -> None:
        self._episode = episode
        self._strict = strict
        self._position = 0

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        steps, position = self._episode.steps, self._position
        if position + 1 >= len(steps) or steps[position + 1].action is None:
            raise ReplayDivergenceError(
                f"Recorded episode {self._episode.episode_id} has {max(len(steps) - 1, 0)} actions, "
                f"and the agent asks for one more (request {position + 1})."
            )
        if self._strict:
            self._compare(steps[position].observation or {}, serialize_llm_request(request))
        self._position += 1
        action = steps[position + 1].action
        assert action is not None
        return deserialize_llm_response(action)

    def _compare(self, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        difference = first_difference(recorded, asked)
        if difference is None:
            return
        counts = f"{len(asked.get('messages', ()))} messages where {len(recorded.get('messages', ()))} were recorded"
        raise ReplayDivergenceError(
            f"Request {self._position + 1} of task {self._episode.task_name!r} differs from the recorded one "
            f"(episode {self._episode.episode_id}): {_in_words(difference, counts)}. "
            "Use `policy.strict=false` to answer all the same."
        )


def _in_words(difference: Difference, counts: str) -> str:
    """Both texts from a little before the first character that differs."""
    old, new = difference.old, difference.new
    if difference.where.startswith("message") and (old is None or new is None):
        return counts
    old, new = str(old), str(new)
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - 20)
    was, now = old[start : start + SHOWN_CHARS], new[start : start + SHOWN_CHARS]
    return f"{difference.where}: recorded {was!r}, now {now!r} (from character {start})"
