"""Episodes of an agent that runs a command at every step, as tests want them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ares_exp.containers.activity import CommandRecord
from ares_exp.llms.request import FrozenList, LLMRequest, freeze
from ares_exp.llms.response import LLMResponse, TextData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.files.episode_file import dump_episode, find_episodes, is_shared
from ares_exp.trajectories.files.line_file import write_lines
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
    total_reward,
)


def with_response(episode: EpisodeTrajectory, response: LLMResponse, *, step: int = 1) -> EpisodeTrajectory:
    steps = [*episode.steps]
    steps[step] = replace(steps[step], action=serialize_llm_response(response))
    return replace(episode, steps=tuple(steps))


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def user(content: str) -> dict[str, Any]:
    return said("user", content)


def assistant(content: str) -> dict[str, Any]:
    return said("assistant", content)


def answered(
    requests: Sequence[LLMRequest], responses: Sequence[LLMResponse], *, reward: float | None = 1.0, **fields: Any
) -> EpisodeTrajectory:
    """An episode in which a policy gave one response to each request; `fields` are other fields of the episode."""
    steps = []
    for number in range(len(requests) + 1):
        first, last = number == 0, number == len(requests)
        steps.append(
            StepRecord(
                step_index=number,
                step_type="FIRST" if first else "LAST" if last else "MID",
                observation=None if last else serialize_llm_request(requests[number]),
                action=None if first else serialize_llm_response(responses[number - 1]),
                reward=None if first else reward if last else 0.0,
                discount=None if first else 0.0 if last else 1.0,
                timestamp=float(number),
            )
        )
    outcome = fields.setdefault("outcome", Outcome.COMPLETED)
    return EpisodeTrajectory(
        **{"episode_id": "e", "task_name": "task", **fields},
        steps=tuple(steps),
        start_time=0.0,
        end_time=float(len(steps)),
        total_reward=total_reward(steps),
        num_steps=len(steps),
        truncated=outcome is Outcome.TRUNCATED,
    )


def chat(
    episode_id: str = "a1",
    task: str = "fix-bug",
    *,
    length: int = 4,
    reward: float | None = 1.0,
    start: float = 1000.0,
    outcome: Outcome = Outcome.COMPLETED,
    **settings: Any,
) -> EpisodeTrajectory:
    """A whole episode: a request, then `length - 1` answers, each with a command."""
    messages = freeze([said("user", f"Please do {task}.")])
    requests, replies = [], []
    for number in range(1, length):
        requests.append(LLMRequest(messages, **settings))
        replies.append(LLMResponse([TextData(f"I do {number}.")], cost=0.25, usage=Usage(100, 10), model="tiny"))
        new = freeze([said("assistant", f"I do {number}."), said("user", f"done {number}")])
        messages = FrozenList((*messages, *new))
    error = None if outcome is Outcome.COMPLETED else ErrorInfo("Trouble", "it went wrong")
    metadata = {"seed": 7, "agent": {"name": "shell"}}
    known = {"episode_id": episode_id, "task_name": task, "outcome": outcome, "error": error, "metadata": metadata}
    episode = answered(requests, replies, reward=reward, **known)
    for step in episode.steps:
        commands = (CommandRecord(f"run {step.step_index}", 0, 0.5),) if step.step_index else ()
        episode = with_step(episode, step.step_index, timestamp=start + step.step_index, commands=commands)
    return replace(episode, start_time=start, end_time=start + length)


def with_step(episode: EpisodeTrajectory, number: int, **changes: Any) -> EpisodeTrajectory:
    steps = list(episode.steps)
    steps[number] = replace(steps[number], **changes)
    return replace(episode, steps=tuple(steps))


def write(path: Path, *episodes: EpisodeTrajectory) -> Path:
    """Writes episodes to a file, in the format that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, (line for episode in episodes for line in dump_episode(episode, shared=is_shared(path))))
    return path


def read_episodes(path: Path, *, problems: list[str] | None = None) -> Iterator[EpisodeTrajectory]:
    return (found.trajectory for found in find_episodes(path, problems=problems))


def salvaged(path: Path) -> tuple[list[EpisodeTrajectory], list[str]]:
    """Returns the readable episodes of a file, and what is wrong with it."""
    problems: list[str] = []
    return list(read_episodes(path, problems=problems)), problems


def cut(path: Path, keep: float | int) -> Path:
    """Cuts a file short: to a share of it, or by so many bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else -keep])
    return path


def ids(episodes: Iterable[Any]) -> list[str]:
    return [episode.episode_id for episode in episodes]
