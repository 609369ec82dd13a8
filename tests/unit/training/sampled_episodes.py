"""Episodes with token ids, as an engine would have given them, and the rule that rows made of them keep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.training.sequences import TrainingSequence
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
)


@dataclass(frozen=True)
class Call:
    """What the engine was given and what it sampled."""

    prompt: Sequence[int]
    completion: Sequence[int]
    conversation: str = MAIN_CONVERSATION
    version: str | None = None

    @property
    def logprobs(self) -> list[float]:
        """One for each token, different at each place: a shift by one is another list."""
        return [-(1 + at + len(self.prompt)) / 1024 for at in range(len(self.completion))]


def respond(call: Call, **more: Any) -> LLMResponse:
    fields: dict[str, Any] = {
        "prompt_token_ids": list(call.prompt),
        "completion_token_ids": list(call.completion),
        "logprobs": call.logprobs,
        "sampling": {"temperature": 1.0},
        "policy_version": call.version,
    }
    return LLMResponse.from_text("text that is not these tokens", **{**fields, **more})


def episode(
    calls: Iterable[Call],
    *,
    reward: float | None = 1.0,
    request: LLMRequest | None = None,
    attempt: int = 0,
    name: str = "e1",
    **more: Any,
) -> EpisodeTrajectory:
    """An episode in which these calls were made one after the other."""
    calls = list(calls)
    asked = request or LLMRequest([{"role": "user", "content": "go"}])
    steps = []
    for number in range(len(calls) + 1):
        last = number == len(calls)
        conversation = "" if last else calls[number].conversation
        origin = (
            Origin("chat_completions", conversation)
            if conversation and conversation != MAIN_CONVERSATION
            else asked.origin
        )
        observation = LLMRequest(**{f: getattr(asked, f) for f in asked.__dataclass_fields__} | {"origin": origin})
        steps.append(
            StepRecord(
                step_index=number,
                step_type="FIRST" if number == 0 else "LAST" if last else "MID",
                observation=None if last else serialize_llm_request(observation),
                action=serialize_llm_response(respond(calls[number - 1], **more)) if number else None,
                reward=None if number == 0 else reward if last else 0.0,
                discount=None if number == 0 else 0.0 if last else 1.0,
                timestamp=float(number),
            )
        )
    return EpisodeTrajectory(
        episode_id=name,
        task_name="task",
        steps=tuple(steps),
        start_time=0.0,
        end_time=float(len(steps)),
        total_reward=reward,
        num_steps=len(steps),
        truncated=False,
        outcome=Outcome.COMPLETED,
        metadata={"attempt": attempt},
        rewards={} if reward is None else {"reward": reward},
    )


def check_rule(rows: Iterable[TrainingSequence], calls: Sequence[Call]) -> int:
    """Asserts that each token with mask 1 was sampled there, with that log-probability, after exactly those tokens.

    Returns how many tokens are trained on; each is one of another place of the calls.
    """
    trained: set[tuple[int, int]] = set()
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.logprobs)
        assert [row.logprobs[at] for at, sampled in enumerate(row.mask) if not sampled] == [0.0] * row.mask.count(0)
        for at in (at for at, sampled in enumerate(row.mask) if sampled):
            places = [
                (number, offset)
                for number, call in enumerate(calls)
                if call.conversation == row.conversation
                and 0 <= (offset := at - len(call.prompt)) < len(call.completion)
                and (*call.prompt, *call.completion[: offset + 1]) == row.ids[: at + 1]
                and call.logprobs[offset] == row.logprobs[at]
                and (number, offset) not in trained
            ]
            assert places, f"token {at} of the row of steps {row.steps} was never sampled there"
            trained.add(places[0])
    return len(trained)
