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
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_response, serialize_llm_request

SHOWN_CHARS = 120


class ReplayPolicy(SharedPolicy):
    """Plays recorded episodes again, each request compared with the recorded one before it is answered."""

    @validate_call
    def __init__(self, *, trajectory: Path, strict: bool = True) -> None:
        """Names the recording; reads nothing yet.

        Args:
            trajectory: A trajectory file, a folder of them, or a run directory with a `trajectories` folder.
            strict: Whether a request that differs from the recorded one ends the episode; if not, it is answered all
                the same.
        """
        self._path = trajectory
        self._strict = strict
        self._episodes: dict[str, list[EpisodeTrajectory]] = {}

    async def preflight(self) -> None:
        """Reads the recording. Raises `PreflightError` when there is none, or when it cannot be read."""
        folder = self._path / "trajectories" if (self._path / "trajectories").is_dir() else self._path
        files = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
        if not files:
            raise PreflightError(f"Expected recorded episodes (*.json) in `policy.trajectory`, found none in {folder}.")
        try:
            recorded = [EpisodeTrajectory.load(path) for path in files]
        except TrajectoryFormatError as error:
            raise PreflightError(f"Cannot read `policy.trajectory`: {error}") from None
        # What the oracle did can only be done again with the solution in place.
        self.needs_solution = any(_is_oracle(episode) for episode in recorded)
        self._episodes = {}
        for episode in sorted(recorded, key=lambda episode: episode.start_time):
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
        difference = _first_difference(recorded, asked)
        if difference is not None:
            raise ReplayDivergenceError(
                f"Request {self._position + 1} of task {self._episode.task_name!r} differs from the recorded one "
                f"(episode {self._episode.episode_id}): {difference}. "
                "Use `policy.strict=false` to answer all the same."
            )


def _first_difference(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """The first difference between two serialised requests, in words; `None` when they are equal."""
    before, now = recorded.get("messages", ()), asked.get("messages", ())
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return f"message {index} ({new.get('role')}): {_text_difference(_text(old), _text(new))}"
    if len(before) != len(now):
        return f"{len(now)} messages where {len(before)} were recorded"
    for name in sorted((set(recorded) | set(asked)) - {"messages"}):
        if recorded.get(name) != asked.get(name):
            return f"`{name}`: {_text_difference(str(recorded.get(name)), str(asked.get(name)))}"
    return None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else str(dict(message))


def _text_difference(old: str, new: str) -> str:
    """Both texts from a little before the first character that differs."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - 20)
    was, now = old[start : start + SHOWN_CHARS], new[start : start + SHOWN_CHARS]
    return f"recorded {was!r}, now {now!r} (from character {start})"
