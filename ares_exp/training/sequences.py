"""Training sequences: rows of tokens from the LLM calls of an episode.

```
report = sequences_of(episode)     # an EpisodeTrajectory, a StoredEpisode of `load(run)`, or its dict
report.rows                        # each with ids, mask, logprobs, reward, conversation, …
report.sentences()                 # how many rows are clean, re-aligned or forked, and how many calls were skipped
```

All rows have this property: the engine sampled each token with mask 1, with the recorded log-probability, after exactly
the preceding tokens of the row. All token ids come from the engine. This module does not tokenize.

A call extends the longest row that is an exact prefix of its prompt. The rest of the prompt is context (mask 0), and
the sampled tokens are trained on (mask 1). If no row is a prefix, the history was rewritten or tokenized differently.
The call then starts a new row, a *fork*. The whole prompt is context in a fork, so that no token is trained on twice.

With `realign_tokens`, a call can also extend a row whose last sampled tokens differ from the prompt. The tokens of the
prompt replace them, and are context. This happens if the next prompt tokenizes the same text differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import UntrainableError
from ares_exp.records.terminal_text import count_of
from ares_exp.training.sampled_calls import Accepted, SampledCall, calls_of, conversations_of, distinct_versions
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import StoredEpisode

Made = Literal["clean", "realigned", "forked"]
Lost = Literal["mask", "group"]
"""Treatment of an episode without a reward: `mask` excludes only it, `group` excludes all episodes of its prompt."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One row: context and sampled tokens, in the engine's order.

    Attributes:
        ids: Ids of all tokens.
        mask: 1 for each token that was sampled and is trained on, otherwise 0.
        logprobs: Log-probability of each token at sampling; 0.0 where the mask is 0.
        reward: Total reward of the episode, the same in all of its rows; `None` if the episode has no reward.
        rewards: Rewards of the verifier and the scorers, by name.
        conversation: Name of the conversation: `main`, or the conversation of a sub-agent or a background request.
        task: Name of the task.
        attempt: Number of the attempt at the task, from 0; `None` if unknown.
        episode_id: Id of the episode.
        policy_versions: Versions of the weights that sampled the tokens, without repetitions; empty if unknown.
        steps: `step_index` of each sampled action, in order.
        starts: Index in `ids` at which the sampled tokens of each step start.
        made: `clean` if every call continues where the previous call ended. `realigned` if tokens of a prompt replaced
            sampled tokens. `forked` if the row starts with a rewritten history.
        finish_reason: Reason why the last response ended; `None` if unknown.
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
        """Raises `ValueError` if the lengths of the lists do not match."""
        lengths = len(self.ids), len(self.mask), len(self.logprobs)
        if len(set(lengths)) > 1:
            raise ValueError("Expected as many mask values and logprobs as ids ({}), got {} and {}".format(*lengths))
        if not self.starts or len(self.starts) != len(self.steps):
            raise ValueError(f"Expected one start per step, got {len(self.starts)} starts for {len(self.steps)} steps")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first sampled token."""
        return self.ids[: self.starts[0]]

    @property
    def response_ids(self) -> tuple[int, ...]:
        """The tokens from the first sampled token to the end, including context between calls."""
        return self.ids[self.starts[0] :]

    @property
    def response_mask(self) -> tuple[int, ...]:
        """The values of `mask` for `response_ids`."""
        return self.mask[self.starts[0] :]

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        """The values of `logprobs` for `response_ids`."""
        return self.logprobs[self.starts[0] :]

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return sum(self.mask)

    def untrained(self) -> TrainingSequence:
        """Returns the same row with a mask of zeros, so that none of its tokens are trained on."""
        return replace(self, mask=(0,) * len(self.mask), logprobs=(0.0,) * len(self.logprobs))


NO_ROW = TrainingSequence((0, 0), (0, 0), (0.0, 0.0), None, {}, MAIN_CONVERSATION, "", None, "", (), (0,), (1,))
"""The row that replaces an episode without rows, because trainers expect one. It has two tokens, both untrained."""


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """The training rows of an episode, and counts of its calls and tokens.

    Attributes:
        rows: Rows, grouped by conversation, in the order in which they started.
        calls: Number of LLM calls in the rows.
        untrained_tokens: Number of sampled tokens that are not trained on because of re-alignments.
        other_conversations: Number of calls in each conversation that was not selected, by its name.
        unstated_sampling: Number of calls whose record lacks the temperature, or contains a `null` parameter.
    """

    rows: tuple[TrainingSequence, ...]
    calls: int
    untrained_tokens: int = 0
    other_conversations: Mapping[str, int] = field(default_factory=dict)
    unstated_sampling: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether the episode cannot be trained on, because it has no rows or no reward."""
        return not self.rows or self.rows[0].reward is None

    @property
    def made(self) -> Counter[str]:
        """The number of rows for each value of `TrainingSequence.made`."""
        return Counter(row.made for row in self.rows)

    def sentences(self) -> list[str]:
        """Returns a summary of the counts for people, one sentence per item."""
        counts = SequenceCounts()
        counts.add(self)
        return counts.sentences()


@dataclass(slots=True)
class SequenceCounts:
    """The sums of the counts of several reports. `SequenceReport` describes the attributes."""

    rows: int = 0
    calls: int = 0
    trained_tokens: int = 0
    untrained_tokens: int = 0
    unstated_sampling: int = 0
    made: Counter[str] = field(default_factory=Counter)
    other_conversations: Counter[str] = field(default_factory=Counter)

    def add(self, report: SequenceReport) -> None:
        """Adds the report of an episode."""
        self.rows += len(report.rows)
        self.calls += report.calls
        self.trained_tokens += sum(row.trained_tokens for row in report.rows)
        self.untrained_tokens += report.untrained_tokens
        self.unstated_sampling += report.unstated_sampling
        self.made += report.made
        self.other_conversations.update(report.other_conversations)

    def sentences(self) -> list[str]:
        """Returns a summary of the counts for people, one sentence per item."""
        sentences = [
            f"{count_of(self.rows, 'row')} of {count_of(self.calls, 'call')}, "
            f"{count_of(self.trained_tokens, 'token')} trained on: {self.made['clean']:,} clean, "
            f"{self.made['realigned']:,} re-aligned, {self.made['forked']:,} forked."
        ]
        if self.untrained_tokens:
            sentences.append(
                f"Excluded from training, because of re-alignments: {count_of(self.untrained_tokens, 'sampled token')}."
            )
        if self.other_conversations:
            names = sorted(self.other_conversations)
            named = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            sentences.append(
                f"Left out: {count_of(self.other_conversations.total(), 'call')} of other conversations ({named})."
            )
        if self.unstated_sampling:
            sentences.append(
                f"{count_of(self.unstated_sampling, 'call')} recorded without a temperature, or with a parameter that "
                "the engine chose (`null`). The rows are correct only if the engine used the expected temperature and "
                "no top-p or top-k."
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
    """Creates the training sequences of an episode.

    Args:
        episode: A trajectory in memory or as a dict, or a stored episode from `ares_exp.trajectories.load`.
        conversations: Names or patterns of the conversations to train on. `["*"]` selects all conversations, including
            sub-agents and background requests.
        realign_tokens: Maximum number of sampled tokens at the end of a row that the next prompt may replace. If more
            tokens differ, the next call starts a new row. With 0, this happens for each difference.
        temperature: Required sampling temperature of the calls; `None` accepts any.
        altered_sampling: Whether to accept calls whose sampling was changed by a truncation, a penalty or a grammar.

    Raises:
        UntrainableError: The conversations have no calls, or a call has no ids or log-probabilities, or its sampling
            was altered. The message contains the episode, the step and a fix.
        TrajectoryFormatError: The stored episode is broken.
        ValueError: `realign_tokens` is negative.
    """
    if realign_tokens < 0:
        raise ValueError(f"Expected `realign_tokens` to be at least 0, got {realign_tokens}.")
    accepted = Accepted(conversations, temperature, altered_sampling)
    trajectory = _trajectory(episode)
    calls = list(calls_of(trajectory, accepted))
    others = Counter(conversation for conversation in conversations_of(trajectory) if not accepted.takes(conversation))
    if not calls:
        there = f". Its other conversations are {', '.join(sorted(others))}" if others else ""
        raise UntrainableError(
            f"Episode {trajectory.episode_id} ({trajectory.task_name}) has no sampled tokens in the conversations "
            f"{', '.join(conversations)}{there}."
        )
    by_conversation: dict[str, list[_Row]] = {}
    for call in calls:
        rows = by_conversation.setdefault(call.conversation, [])
        if (row := _continued(rows, call.prompt, realign_tokens)) is not None:
            row.go_on(call)
        else:
            rows.append(_Row(call, "forked" if rows else "clean"))
    return SequenceReport(
        rows=tuple(row.finished(trajectory) for rows in by_conversation.values() for row in rows),
        calls=len(calls),
        untrained_tokens=sum(row.untrained for rows in by_conversation.values() for row in rows),
        other_conversations=dict(others),
        unstated_sampling=sum(not call.states_sampling for call in calls),
    )


def _trajectory(episode: EpisodeTrajectory | StoredEpisode | Mapping[str, Any]) -> EpisodeTrajectory:
    if isinstance(episode, EpisodeTrajectory):
        return episode
    return episode.load() if isinstance(episode, StoredEpisode) else EpisodeTrajectory.from_dict(episode)


class _Row:
    """A row under construction, which further calls can extend."""

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
        """Appends the rest of a call's prompt, which must start with the tokens of the row, and its sampled tokens."""
        context = call.prompt[len(self.ids) :]
        self.ids += context
        self.mask += [0] * len(context)
        self.logprobs += [0.0] * len(context)
        self.starts.append(len(self.ids))
        self.ids += call.completion
        self.mask += [1] * len(call.completion)
        self.logprobs += call.logprobs
        self.calls.append(call)

    def cut(self, length: int) -> None:
        """Removes the tokens from index `length` to the end. All of them must be sampled tokens of the last call."""
        self.untrained += len(self.ids) - length
        del self.ids[length:], self.mask[length:], self.logprobs[length:]
        self.made = "realigned" if self.made == "clean" else self.made

    def finished(self, episode: EpisodeTrajectory) -> TrainingSequence:
        attempt = episode.metadata.get("attempt")
        return TrainingSequence(
            ids=tuple(self.ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            reward=episode.total_reward,
            rewards=episode.rewards,
            conversation=self.calls[0].conversation,
            task=episode.task_name,
            attempt=attempt if type(attempt) is int else None,
            episode_id=episode.episode_id,
            policy_versions=distinct_versions(call.policy_version for call in self.calls),
            steps=tuple(call.step for call in self.calls),
            starts=tuple(self.starts),
            made=self.made,
            finish_reason=self.calls[-1].finish_reason,
        )


def _continued(rows: Sequence[_Row], prompt: Sequence[int], realign_tokens: int) -> _Row | None:
    """Returns the row of a conversation that a prompt continues: the longest row that is a prefix of the prompt.

    If there is no such row, removes the tokens at the end of a row that differ from the prompt, and returns the row.
    Changes nothing and returns `None` if more than `realign_tokens`, or the whole last response, would be removed.
    """
    if whole := [row for row in rows if list(prompt[: len(row.ids)]) == row.ids]:
        return max(whole, key=lambda row: len(row.ids))
    shared = [(len(row.ids) - _shared(row.ids, prompt), row) for row in rows]
    lost, row = min(shared, key=lambda item: item[0], default=(0, None))
    if row is None or lost > realign_tokens or len(row.ids) - lost <= row.starts[-1]:
        return None
    row.cut(len(row.ids) - lost)
    return row


def _shared(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns the length of the common prefix of two token lists."""
    pairs = zip(ids, prompt, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(ids), len(prompt)))
