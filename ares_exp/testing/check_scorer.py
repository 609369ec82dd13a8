"""`check_scorer`, which lets you test a scorer without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ares_exp.containers.container import Container
from ares_exp.environments.scoring.scorer import ConfiguredScorer, ScoredEpisode, as_scorer
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request, serialize_llm_response


def sample_episode(
    *responses: str,
    task: str = "Say hello.",
    task_name: str = "sample",
    reward: float | None = 1.0,
    rewards: Mapping[str, float] | None = None,
) -> ScoredEpisode:
    """Creates a finished episode for tests of scorers.

    Args:
        responses: The texts of the policy's responses, one per request.
        task: Text of the first message in the conversation.
        task_name: Name of the task.
        reward: The verifier's reward; `None` for a truncated episode that was not verified.
        rewards: All rewards of the verifier; by default only `reward`.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    steps = []
    for number in range(len(responses) + 1):
        is_last = number == len(responses)
        action = responses[number - 1] if number else None
        if action is not None:
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": "Go on."}]
        steps.append(
            StepRecord(
                step_index=number,
                step_type="LAST" if number and is_last else "MID" if number else "FIRST",
                observation=None if number and is_last else serialize_llm_request(LLMRequest(list(messages))),
                action=None if action is None else serialize_llm_response(LLMResponse.from_text(action)),
                reward=(reward if is_last else 0.0) if number else None,
                discount=(0.0 if is_last and reward is not None else 1.0) if number else None,
                timestamp=float(number),
            )
        )
    trajectory = EpisodeTrajectory(
        episode_id="sample",
        task_name=task_name,
        steps=tuple(steps),
        start_time=0.0,
        end_time=float(len(steps)),
        total_reward=reward,
        num_steps=len(steps),
        truncated=reward is None,
        outcome=Outcome.TRUNCATED if reward is None else Outcome.COMPLETED,
    )
    known = {} if reward is None else {"reward": reward}
    return ScoredEpisode(trajectory=trajectory, reward=reward, rewards=known if rewards is None else rewards)


async def check_scorer(
    scorer: object,
    episode: ScoredEpisode | None = None,
    container: Container | None = None,
    *,
    name: str = "scorer",
    timeout_sec: float = 60.0,
) -> dict[str, float]:
    """Calls a scorer for one episode as a run does, and returns the rewards as a run would record them, by name.

    Args:
        scorer: The scorer: a function or another callable object.
        episode: Episode to score. By default, an episode with one response and the reward 1.0 (see `sample_episode`).
        container: A started container; `None` for the scorer of an environment without a container.
        name: Name of the scorer.
        timeout_sec: Time limit of the call in seconds.

    Raises:
        ConfigError: The object is not a scorer.
        PreflightError: The scorer is not ready.
        ScorerError: The scorer raised, took too long, or returned no rewards.
    """
    whole = as_scorer(scorer)
    whole.set_name(name, f"env.scorers.{name}")
    await whole.preflight()
    try:
        given = episode if episode is not None else sample_episode("Hello.")
        score = await ConfiguredScorer(name, scorer, timeout_sec=timeout_sec).score(given, container)
    finally:
        await whole.close()
    return dict(score.rewards)
