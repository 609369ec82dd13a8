"""Episodes with token ids, as an engine would have given them, and the rule that rows made of them keep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.training.sequences import TrainingSequence
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.trajectories.chats import answered


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
    calls = list(calls)
    asked = request or LLMRequest([{"role": "user", "content": "go"}])
    requests = [
        replace(asked, origin=Origin("chat_completions", call.conversation))
        if call.conversation != MAIN_CONVERSATION
        else asked
        for call in calls
    ]
    return replace(
        answered(requests, [respond(call, **more) for call in calls], reward=reward, episode_id=name),
        total_reward=reward,
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
