"""Training sequences: rows of tokens, made of the LLM calls of an episode.

```
report = sequences_of(episode)     # an EpisodeTrajectory, a StoredEpisode of `load(run)`, or its dict
report.rows                        # each with ids, mask, logprobs, reward, conversation, …
report.sentences()                 # how many rows are clean, re-aligned and forked, and what was left out
```

The rule: a token with mask 1 is one that the engine sampled, with the log-probability it had then, after exactly the
tokens that stand before it in the row. Nothing is tokenised here; ids are those of the engine.

A call goes on in the row that is the longest exact start of its prompt: what the prompt has beyond the row is
context (mask 0), what was sampled is trained on (mask 1). Where there is no such row, the history was rewritten, or
became other tokens, and the call starts a row of its own, a fork: all of its prompt is context there, so that no token
is trained on twice. With `realign_tokens` a row may go on although its end differs from the prompt: the prompt's tokens
take the place of the row's, and as many sampled ones as that lose their training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import UntrainableError
from ares_exp.records.terminal_text import count_of
from ares_exp.training.sampled_calls import Accepted, SampledCall, calls_of, conversations_of
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import StoredEpisode

Made = Literal["clean", "realigned", "forked"]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One row: context and sampled tokens in the order in which the engine had them.

    Attributes:
        ids: All tokens.
        mask: For each, 1 if it was sampled and is trained on, else 0.
        logprobs: For each, the log-probability with which it was sampled; 0.0 where the mask is 0.
        reward: The episode's total reward, `None` where it has none. All rows of an episode have it.
        rewards: What verifier and scorers said of the episode, by name.
        conversation: The conversation: `main`, or the name of a sub-agent's or a background request's.
        task: The task.
        attempt: Which attempt at the task, from 0; `None` where that is not known.
        episode_id: The episode.
        policy_versions: Versions of the weights that sampled, each once, in order; empty where none is known.
        steps: `step_index` of the actions that were sampled here, in order.
        starts: Where in `ids` the tokens of each of these start.
        made: `clean`: every call went on where the one before had ended; `realigned`: some of the prompt's tokens took
            the place of sampled ones; `forked`: started where the history of an earlier row was left.
        finish_reason: Why the last call ended, where that is known.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float | None
    rewards: Mapping[str, float]
    conversation: str
    task: str
    attempt: int | None
    episode_id: str
    policy_versions: tuple[str, ...]
    steps: tuple[int, ...]
    starts: tuple[int, ...]
    made: Made = "clean"
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        """Refuses lists that do not belong together."""
        lengths = len(self.ids), len(self.mask), len(self.logprobs)
        if len(set(lengths)) > 1:
            raise ValueError("Expected as many mask values and logprobs as ids, got {1}, {2} and {0}".format(*lengths))
        if not self.starts or len(self.starts) != len(self.steps):
            raise ValueError(f"Expected a start for each step, got {len(self.starts)} for {len(self.steps)}")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first sampled one."""
        return self.ids[: self.starts[0]]

    @property
    def response_ids(self) -> tuple[int, ...]:
        """The tokens from the first sampled one on, context between the calls included."""
        return self.ids[self.starts[0] :]

    @property
    def response_mask(self) -> tuple[int, ...]:
        """The mask of `response_ids`."""
        return self.mask[self.starts[0] :]

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        """The log-probabilities of `response_ids`."""
        return self.logprobs[self.starts[0] :]

    @property
    def trained_tokens(self) -> int:
        """How many tokens are trained on."""
        return sum(self.mask)

    def known_reward(self) -> float:
        """Returns the reward. Raises `UntrainableError` where the episode has none."""
        if self.reward is None:
            raise UntrainableError(f"Episode {self.episode_id} ({self.task}) has no reward: leave it out.")
        return self.reward


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """The rows of an episode, and how they came about.

    Attributes:
        rows: The rows, those of a conversation together, in the order in which they started.
        calls: How many calls of the policy they are made of.
        untrained_tokens: Sampled tokens that lost their training to a re-alignment.
        other_conversations: Calls of conversations that are not trained on, by conversation.
        unstated_sampling: Calls whose record lacks the temperature or has a parameter that was left to the engine.
    """

    rows: tuple[TrainingSequence, ...]
    calls: int
    untrained_tokens: int = 0
    other_conversations: Mapping[str, int] = field(default_factory=dict)
    unstated_sampling: int = 0

    @property
    def clean(self) -> int:
        """Rows in which every call went on exactly where the one before had ended."""
        return self._made("clean")

    @property
    def realigned(self) -> int:
        """Rows that start a conversation and were re-aligned."""
        return self._made("realigned")

    @property
    def forked(self) -> int:
        """Rows that were started because a history was rewritten."""
        return self._made("forked")

    def _made(self, how: Made) -> int:
        return sum(row.made == how for row in self.rows)

    def sentences(self) -> list[str]:
        """Returns the counts in sentences."""
        counts = SequenceCounts()
        counts.add(self)
        return counts.sentences()


@dataclass(slots=True)
class SequenceCounts:
    """What several reports count together: the sums of their attributes, as `SequenceReport` has them."""

    episodes: int = 0
    rows: int = 0
    calls: int = 0
    trained_tokens: int = 0
    untrained_tokens: int = 0
    unstated_sampling: int = 0
    made: Counter[str] = field(default_factory=Counter)
    other_conversations: Counter[str] = field(default_factory=Counter)

    def add(self, report: SequenceReport) -> None:
        """Adds the report of an episode."""
        self.episodes += 1
        self.rows += len(report.rows)
        self.calls += report.calls
        self.trained_tokens += sum(row.trained_tokens for row in report.rows)
        self.untrained_tokens += report.untrained_tokens
        self.unstated_sampling += report.unstated_sampling
        self.made.update(row.made for row in report.rows)
        self.other_conversations.update(report.other_conversations)

    def sentences(self) -> list[str]:
        """Returns the counts in sentences."""
        sentences = [
            f"{count_of(self.rows, 'row')} of {count_of(self.calls, 'call')}, "
            f"{count_of(self.trained_tokens, 'token')} trained on: {self.made['clean']:,} clean, "
            f"{self.made['realigned']:,} re-aligned, {self.made['forked']:,} forked."
        ]
        if self.untrained_tokens:
            sentences.append(
                f"Not trained on, because of re-alignments: {count_of(self.untrained_tokens, 'sampled token')}."
            )
        if self.other_conversations:
            named = ", ".join(sorted(self.other_conversations)[:3]) + (
                ", …" if len(self.other_conversations) > 3 else ""
            )
            sentences.append(
                f"Left out: {count_of(self.other_conversations.total(), 'call')} of other conversations ({named})."
            )
        if self.unstated_sampling:
            sentences.append(
                f"The record of {count_of(self.unstated_sampling, 'call')} has no temperature, or leaves a parameter "
                "to the engine (`null`). The rows are correct only if the engine used the expected temperature and no "
                "truncation."
            )
        return sentences


def sequences_of(
    episode: EpisodeTrajectory | StoredEpisode | Mapping[str, Any],
    *,
    conversations: Collection[str] = (MAIN_CONVERSATION,),
    realign_tokens: int = 0,
    temperature: float | None = 1.0,
    altered_sampling: bool = False,
) -> SequenceReport:
    """Makes the rows of an episode.

    Args:
        episode: A trajectory in memory, one on disk (`ares_exp.trajectories.load` finds them), or the dict of either.
        conversations: Names or patterns of the conversations that are trained on: `["*"]` for all, sub-agents and
            background requests included.
        realign_tokens: How many sampled tokens at the end of a call may lose their training, so that a row whose next
            prompt spells its end in other tokens goes on in place of a fork.
        temperature: At which the calls must have been sampled; `None` for any.
        altered_sampling: Whether calls are taken whose sampling a truncation, a penalty or a grammar changed.

    Raises:
        UntrainableError: A call of these conversations has no ids or log-probabilities, or its sampling was altered,
            or there is none; the message names the episode, the step and the remedy.
        TrajectoryFormatError: The episode on disk is broken.
    """
    if realign_tokens < 0:
        raise ValueError(f"Expected `realign_tokens` to be at least 0, got {realign_tokens}.")
    accepted = Accepted(conversations, temperature, altered_sampling)
    trajectory = _trajectory(episode)
    calls = list(calls_of(trajectory, accepted))
    others = Counter(conversation for conversation in conversations_of(trajectory) if not accepted.takes(conversation))
    if not calls:
        there = f"; there are {', '.join(sorted(others))}" if others else ""
        raise UntrainableError(
            f"Episode {trajectory.episode_id} ({trajectory.task_name}) has no sampled tokens in the conversations "
            f"{', '.join(conversations)}{there}."
        )
    by_conversation: dict[str, _ConversationRows] = {}
    for call in calls:
        by_conversation.setdefault(call.conversation, _ConversationRows(realign_tokens)).add(call)
    return SequenceReport(
        rows=tuple(
            row.finished(trajectory, conversation)
            for conversation, rows in by_conversation.items()
            for row in rows.rows
        ),
        calls=len(calls),
        untrained_tokens=sum(row.untrained for rows in by_conversation.values() for row in rows.rows),
        other_conversations=dict(others),
        unstated_sampling=sum(not call.states_sampling for call in calls),
    )


def _trajectory(episode: EpisodeTrajectory | StoredEpisode | Mapping[str, Any]) -> EpisodeTrajectory:
    if isinstance(episode, EpisodeTrajectory):
        return episode
    return episode.load() if isinstance(episode, StoredEpisode) else EpisodeTrajectory.from_dict(episode)


class _Row:
    """A row that may go on."""

    def __init__(self, call: SampledCall, made: Made) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.calls: list[SampledCall] = []
        self.starts: list[int] = []
        self.made: Made = made
        self.untrained = 0
        self.go_on(call)

    def go_on(self, call: SampledCall) -> None:
        """Adds what a prompt has beyond the row, which it starts with, and what was sampled then."""
        context = call.prompt[len(self.ids) :]
        self.ids += context
        self.mask += [0] * len(context)
        self.logprobs += [0.0] * len(context)
        self.starts.append(len(self.ids))
        self.ids += call.completion
        self.mask += [1] * len(call.completion)
        self.logprobs += call.logprobs
        self.calls.append(call)

    def is_start_of(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt starts with the whole row."""
        return list(prompt[: len(self.ids)]) == self.ids

    def cut(self, length: int) -> None:
        """Takes away all tokens from `length` on, which are sampled ones of the last call."""
        self.untrained += len(self.ids) - length
        del self.ids[length:], self.mask[length:], self.logprobs[length:]
        self.made = "realigned" if self.made == "clean" else self.made

    def finished(self, episode: EpisodeTrajectory, conversation: str) -> TrainingSequence:
        attempt = episode.metadata.get("attempt")
        return TrainingSequence(
            ids=tuple(self.ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            reward=episode.total_reward,
            rewards=episode.rewards,
            conversation=conversation,
            task=episode.task_name,
            attempt=attempt if type(attempt) is int else None,
            episode_id=episode.episode_id,
            policy_versions=tuple(dict.fromkeys(c.policy_version for c in self.calls if c.policy_version is not None)),
            steps=tuple(call.step for call in self.calls),
            starts=tuple(self.starts),
            made=self.made,
            finish_reason=self.calls[-1].finish_reason,
        )


class _ConversationRows:
    """The rows of one conversation so far."""

    def __init__(self, realign_tokens: int) -> None:
        self.rows: list[_Row] = []
        self._realign_tokens = realign_tokens

    def add(self, call: SampledCall) -> None:
        """Adds a call to the row that it goes on from, or starts one."""
        if (row := self._started(call.prompt) or self._realigned(call.prompt)) is not None:
            row.go_on(call)
        else:
            self.rows.append(_Row(call, "forked" if self.rows else "clean"))

    def _started(self, prompt: Sequence[int]) -> _Row | None:
        """Finds the longest row that is a start of the prompt."""
        return max((row for row in self.rows if row.is_start_of(prompt)), key=lambda row: len(row.ids), default=None)

    def _realigned(self, prompt: Sequence[int]) -> _Row | None:
        """Cuts the row of which the fewest tokens must go, if they are few enough and end its last call."""
        shared = [(len(row.ids) - _shared(row.ids, prompt), row) for row in self.rows]
        lost, row = min(shared, key=lambda item: item[0], default=(0, None))
        if row is None or lost > self._realign_tokens or len(row.ids) - lost <= row.starts[-1]:
            return None
        row.cut(len(row.ids) - lost)
        return row


def _shared(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Counts the tokens that both start with."""
    pairs = zip(ids, prompt, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(ids), len(prompt)))
