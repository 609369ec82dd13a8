"""The replay policy, which returns recorded responses, and compares each request with the recorded request.

Its report compares the steps and the rewards of all episodes, and contains a determinism score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TextIO

from pydantic import AfterValidator, Field, validate_call

from ares_exp.errors import PreflightError, ReplayDivergenceError, TrajectoryFormatError, UnansweredError
from ares_exp.llms.request import LLMClient, LLMRequest, edited, recorded_edits
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.records.results import EpisodeResult, Outcome, final_results
from ares_exp.records.run_dir import RunDir
from ares_exp.records.terminal_text import draw, format_number, one_line, printable, write
from ares_exp.trajectories.recorded_responses import (
    Exchange,
    RecordedResponses,
    background_exchanges,
    recorded_exchanges,
)
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    conversation_of,
    serialize_llm_request,
)
from ares_exp.trajectories.request_diff import (
    Difference,
    Match,
    Normaliser,
    StepComparison,
    UserNormaliser,
    apart,
    compiled,
    first_difference,
    make_normalisers,
)
from ares_exp.trajectories.stored_episodes import StoredEpisode, load

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1

MAX_TASKS = 200
MAX_EPISODES = 20
ALWAYS_SHOWN = (Match.EXACT, Match.NORMALISED, Match.DIFFERENT)

ENDED_BY_ITSELF = (Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.AGENT_ERROR, Outcome.VERIFIER_ERROR)
"""Outcomes of episodes that ended by themselves. Episodes with other outcomes were interrupted."""

SHOWN_CHARS = 120
MAX_SEED = 2**31

Strict = bool | Literal["normalised"]
Declared = Annotated[list[str | UserNormaliser], Field(max_length=50)]


def _check_names(declared: Declared) -> Declared:
    make_normalisers(declared)
    return declared


class ReplayPolicy(Policy):
    """Replays recorded episodes. Each request is compared with the recorded request before the policy responds."""

    @validate_call
    def __init__(
        self,
        *,
        trajectory: Path,
        episode: str | None = None,
        strict: Strict = True,
        normalise: Annotated[Declared, AfterValidator(_check_names)] = [],  # noqa: B006  # pydantic copies it
    ) -> None:
        """Stores the settings. `preflight` reads the recording.

        Args:
            trajectory: Run directory, or a file or folder with episodes in any format of `trajectories.load`.
            episode: Id of a single episode to replay, even if incomplete. `None` replays all finished episodes.
            strict: Whether a request that differs from the recorded request ends the episode. `"normalised"` allows
                differences that the normalisers remove. With `False`, the policy responds despite differences.
            normalise: Normalisers, which replace varying parts of requests before these are compared. Each is the name
                of a built-in normaliser, or a custom `{pattern, replacement}`. They are applied in this order, after
                the agent's normalisers. With an empty list, not even the agent's normalisers are applied. See
                `ares_exp.trajectories.request_diff`.
        """
        self._path = trajectory
        self._episode_id = episode
        self._strict: Strict = strict
        self._normalisers = make_normalisers(normalise)
        self._episodes: dict[str, list[EpisodeTrajectory]] = {}
        self._ran: dict[tuple[str, int], _Replayed] = {}

    async def preflight(self) -> None:
        """Reads the recording. Raises `PreflightError` if the recording is missing or invalid."""
        one = self._episode_id
        try:
            stored = load(self._path, partial=one is not None, skip_broken=one is not None)
            if one is None:
                wanted = _last_tries(stored.filter(where=lambda found: found.outcome is not Outcome.LOST))
            else:
                wanted = [found for found in stored if found.episode_id == one]
            recorded = [found.load() for found in wanted]
        except TrajectoryFormatError as error:
            raise PreflightError(f"Cannot read `policy.trajectory`: {error}") from None
        if not recorded:
            expected = "recorded episodes" if one is None else f"the trajectory of episode {one}"
            raise PreflightError(f"`policy.trajectory={self._path}` does not contain {expected}.")
        # The oracle's actions can be repeated only with the solution in the container.
        self.needs_solution = any(episode.is_of_oracle for episode in recorded)
        self._episodes = {}
        for episode in recorded:
            self._episodes.setdefault(episode.task_name, []).append(episode)
        self.recorded_tasks = tuple(self._episodes)

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client that replays a recorded episode of the task.

        If there are more attempts than recorded episodes, later attempts replay the recorded episodes again.

        Raises:
            ReplayDivergenceError: The recording has no episode of the task.
        """
        recorded = self._recorded(episode.task_name, episode.attempt)
        if recorded is None:
            names = ", ".join(sorted(self._episodes)) or "none"
            raise ReplayDivergenceError(
                f"{self._path} has no recorded episode of task {episode.task_name!r}. Its tasks are: {names}. "
                "Select recorded tasks with `env.tasks=…`."
            )
        own = compiled(episode.normalisers) if self._normalisers else ()
        ran = _Replayed(recorded, strict=self._strict, normalisers=(*own, *self._normalisers))
        self._ran[episode.task_name, episode.attempt] = ran
        return ran

    def seed_of(self, task_name: str, attempt: int) -> int | None:
        """Returns the seed of the recorded episode, because the agent may use it; `None` if no seed was recorded."""
        recorded = self._recorded(task_name, attempt)
        seed = None if recorded is None else recorded.metadata.get("seed")
        return seed if isinstance(seed, int) and 0 <= seed < MAX_SEED else None

    def recorded_files(self, task_name: str, attempt: int) -> Path | None:
        """Returns the directory with the files of the recorded episode; `None` if no episode was recorded."""
        recorded = self._recorded(task_name, attempt)
        if recorded is None or Path(recorded.episode_id).name != recorded.episode_id:  # untrusted input
            return None
        return RunDir(self._path).files / recorded.episode_id

    def report(self, results: Sequence[EpisodeResult]) -> ReplayReport | None:
        """Returns a comparison of the replayed episodes with the recorded episodes.

        Omits episodes that ended in an earlier session of a resumed run. Returns `None` if no episode remains.
        """
        episodes = []
        final = final_results(results)
        for result in final:
            recorded = self._recorded(result.task_name, result.attempt)
            ran = self._ran.get((result.task_name, result.attempt))
            if recorded is not None and (ran is not None or result.outcome not in ENDED_BY_ITSELF):
                episodes.append(ReplayedEpisode.of(recorded, result, ran.steps if ran is not None else ()))
        if not episodes and all(result.outcome in ENDED_BY_ITSELF for result in final):
            return None
        used = [*self._normalisers, *(one for ran in self._ran.values() for one in ran.normalisers)]
        return ReplayReport(self._path, tuple(dict.fromkeys(one.name for one in used)), tuple(episodes))

    def _recorded(self, task_name: str, attempt: int) -> EpisodeTrajectory | None:
        recorded = self._episodes.get(task_name)
        return recorded[attempt % len(recorded)] if recorded else None


def _last_tries(stored: Iterable[StoredEpisode]) -> list[StoredEpisode]:
    """Returns the last episode of each attempt, by run and attempt. Keeps all episodes without an attempt number."""
    runs: dict[Path, int] = {}
    last: dict[tuple[int, str, int | str], StoredEpisode] = {}
    for found in stored:
        run = runs.setdefault(found.path.parent, len(runs))
        attempt = found.metadata.get("attempt")
        slot = run, found.task_name, attempt if isinstance(attempt, int) else found.episode_id
        if slot not in last or _number(found, "retry") >= _number(last[slot], "retry"):
            last[slot] = found
    return sorted(last.values(), key=lambda found: (runs[found.path.parent], _number(found, "attempt")))


def _number(found: StoredEpisode, name: str) -> int:
    value = found.metadata.get(name)
    return value if isinstance(value, int) else 0


class _Replayed:
    """A client that replays one recorded episode. Each conversation has its own position in the recording."""

    def __init__(self, episode: EpisodeTrajectory, *, strict: Strict, normalisers: Sequence[Normaliser]) -> None:
        self.steps: list[StepComparison] = []  # of the requests so far
        self._episode = episode
        self._edits = recorded_edits(episode.metadata)
        self._strict = strict
        self.normalisers = normalisers
        self._recorded = RecordedResponses(recorded_exchanges(episode), normalisers=normalisers)
        self._background = RecordedResponses(background_exchanges(episode), normalisers=normalisers)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        if request.origin is not None and request.origin.is_background:
            return self._respond_in_background(request)
        recorded, asked = self._compare(request)
        if recorded is None or recorded.is_pending:
            raise ReplayDivergenceError(
                f"Recorded episode {self._episode.episode_id} has {max(len(self._episode.steps) - 1, 0)} "
                f"actions, but the agent requests another one (request {len(self.steps)}).",
                step=len(self.steps) - 1,
                why="the agent requests more actions than recorded",
            )
        step = self.steps[-1]
        is_tolerated = step.is_same if self._strict == "normalised" else step.match is Match.EXACT
        if self._strict and not is_tolerated:
            self._refuse(recorded.request, asked)
        if recorded.response is None:
            raise UnansweredError(
                f"Recorded episode {self._episode.episode_id} has no response at this step, because it did not "
                "arrive in time."
            )
        return recorded.response

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        if request.origin is not None and request.origin.is_background:
            self._next_background_request(serialize_llm_request(request))
        else:
            self._compare(request)

    def _respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Returns the recorded response to a background request, even if the request differs from the recorded one."""
        asked = serialize_llm_request(request)
        if (recorded := self._next_background_request(asked)) is None:
            raise ReplayDivergenceError(
                f"Recorded episode {self._episode.episode_id} has no response for a background request of the agent "
                f"({conversation_of(asked)}). Run the agent with `agent.background_requests=observe`.",
                step=len(self.steps),
                why="the agent sends more background requests than recorded",
            )
        return recorded

    def _next_background_request(self, asked: Mapping[str, Any]) -> LLMResponse | None:
        if (recorded := self._background.next_for(asked)) is not None:
            self._background.use(asked)
        return None if recorded is None else recorded.response

    def _compare(self, request: LLMRequest) -> tuple[Exchange | None, Mapping[str, Any]]:
        """Compares a request with the next recorded request of its conversation, and appends the result to `steps`.

        Returns the recorded request with its response, and the serialised new request. Returns `None` instead of the
        recorded request if all recorded requests were used.
        """
        position = len(self.steps)
        asked = serialize_llm_request(edited(request, self._edits, position))  # applies the edits of a recorded branch
        recorded = self._recorded.next_for(asked)
        if recorded is None:
            self.steps.append(StepComparison(position, Match.EXTRA))
        else:
            self._recorded.use(asked)
            self.steps.append(self._recorded.compare(recorded, asked, position))
        return recorded, asked

    def _refuse(self, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        step = self.steps[-1]
        words = f"{step.where}: {'; '.join(step.diff)}"
        if self._strict is True and (difference := first_difference(recorded, asked)) is not None:
            words = _in_words(
                difference,
                f"{len(asked.get('messages', ()))} messages instead of {len(recorded.get('messages', ()))}",
            )
        raise ReplayDivergenceError(
            f"Request {step.step + 1} of task {self._episode.task_name!r} differs from the recorded request "
            f"(episode {self._episode.episode_id}): {words}. Use `policy.strict=false` to continue anyway.",
            step=step.step,
            why=words,
        )


def _in_words(difference: Difference, counts: str) -> str:
    old, new = difference.old, difference.new
    if difference.where.startswith("message") and (old is None or new is None):
        return counts
    start, was, now = apart(str(old), str(new), width=SHOWN_CHARS, before=20)
    return f"{difference.where}: recorded {was!r}, now {now!r} (from character {start})"


@dataclass(frozen=True, slots=True)
class Score:
    """The determinism score: how many of the compared steps match their recording.

    Attributes:
        matching: Number of steps that are equal, either exactly or after normalising.
        compared: Number of matching, different and extra steps, plus the recorded steps that the replay did not reach.
            The latter do not count if Ctrl-C, a container failure, or an error of the replay policy ended the replay.
    """

    matching: int = 0
    compared: int = 0

    @property
    def value(self) -> float | None:
        """Ratio of matching steps to compared steps, in [0, 1]; `None` if no step was compared."""
        return self.matching / self.compared if self.compared else None

    @classmethod
    def total(cls, scores: Iterable[Score]) -> Self:
        """Returns the sum of several scores, so that every step has the same weight."""
        every = list(scores)
        return cls(sum(one.matching for one in every), sum(one.compared for one in every))

    def to_dict(self) -> dict[str, Any]:
        """Returns the score as JSON-ready data."""
        return {"score": self.value, "matching_steps": self.matching, "compared_steps": self.compared}


@dataclass(frozen=True, slots=True)
class ReplayedEpisode:
    """One recorded episode and its replay.

    Attributes:
        task_name, attempt: Task and attempt of the replay.
        recorded_id, episode_id: Ids of the recorded episode and of the replay.
        recorded_outcome, outcome: Outcomes of the recorded episode and of the replay.
        recorded_reward, reward: Rewards of the recorded episode and of the replay; `None` if there is no reward.
        steps: Comparisons of all steps, in order. Steps that only one of the two episodes has are included.
    """

    task_name: str
    attempt: int
    recorded_id: str
    episode_id: str
    recorded_outcome: Outcome
    outcome: Outcome
    recorded_reward: float | None
    reward: float | None
    steps: tuple[StepComparison, ...]

    @classmethod
    def of(cls, recorded: EpisodeTrajectory, result: EpisodeResult, compared: Sequence[StepComparison]) -> Self:
        """Creates an instance from comparisons of the reached steps. Adds a comparison for each step not reached."""
        count = sum(step.observation is not None for step in recorded.steps)
        missing = (StepComparison(step, Match.NOT_REACHED) for step in range(len(compared), count))
        return cls(
            task_name=result.task_name,
            attempt=result.attempt,
            recorded_id=recorded.episode_id,
            episode_id=result.episode_id,
            recorded_outcome=recorded.outcome,
            outcome=result.outcome,
            recorded_reward=recorded.total_reward,
            reward=result.reward,
            steps=(*compared, *missing),
        )

    @property
    def score(self) -> Score:
        """Score of the episode's steps."""
        matching = sum(step.is_same for step in self.steps)
        missed = self.count(Match.NOT_REACHED) if self.outcome in ENDED_BY_ITSELF else 0
        return Score(matching, matching + self.count(Match.DIFFERENT, Match.EXTRA) + missed)

    def count(self, *matches: Match) -> int:
        """Returns the number of steps whose comparison has one of the results `matches`."""
        return sum(step.match in matches for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns the episode as JSON-ready data."""
        return {
            "task_name": self.task_name,
            "attempt": self.attempt,
            "episode_id": {"recorded": self.recorded_id, "now": self.episode_id},
            "outcome": {"recorded": self.recorded_outcome.value, "now": self.outcome.value},
            "reward": {"recorded": self.recorded_reward, "now": self.reward},
            **self.score.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
        }


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a run with the replay policy.

    Attributes:
        recording: Path of the recording.
        normalisers: Names of the active normalisers, in order.
        episodes: Replayed episodes, in the order in which they ended.
    """

    recording: Path
    normalisers: tuple[str, ...]
    episodes: tuple[ReplayedEpisode, ...]

    @property
    def score(self) -> Score:
        """Score of all steps of all episodes."""
        return Score.total(episode.score for episode in self.episodes)

    def by_task(self) -> Mapping[str, Sequence[ReplayedEpisode]]:
        """Returns the episodes of each task, sorted by attempt."""
        tasks: dict[str, list[ReplayedEpisode]] = {}
        for episode in sorted(self.episodes, key=lambda one: (one.task_name, one.attempt)):
            tasks.setdefault(episode.task_name, []).append(episode)
        return tasks

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-ready data, the content of `replay.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recording": str(self.recording),
            "normalisers": list(self.normalisers),
            **self.score.to_dict(),
            "tasks": {name: Score.total(one.score for one in own).to_dict() for name, own in self.by_task().items()},
            "episodes": [episode.to_dict() for own in self.by_task().values() for episode in own],
        }

    def render(self, stream: TextIO) -> None:
        """Writes a readable summary to `stream`. `replay.json` contains the full report."""
        write(stream, f"\nReplay of {printable(str(self.recording))}\n")
        if self.episodes:
            write(stream, draw(_table(self), stream))
        shown = [episode for own in self.by_task().values() for episode in own]
        shown.sort(key=lambda episode: episode.score.matching == episode.score.compared)  # different episodes first
        lines = [line for episode in shown[:MAX_EPISODES] for line in _episode_lines(episode)]
        if len(shown) > MAX_EPISODES:
            lines.append(f"and {len(shown) - MAX_EPISODES} more episodes, in replay.json")
        write(stream, "\n".join([*lines, f"{_total_line(self.score)} Details: replay.json", ""]))
        stream.flush()


def _table(report: ReplayReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    table.add_column("task", overflow="fold")
    kinds = [kind for kind in Match if kind in ALWAYS_SHOWN or any(one.count(kind) for one in report.episodes)]
    for name in (*(kind.value for kind in kinds), "score", "reward"):
        table.add_column(name, justify="right")
    tasks = report.by_task()
    for name, own in list(tasks.items())[:MAX_TASKS]:
        counts = [str(sum(episode.count(kind) for episode in own)) for kind in kinds]
        rewards = [_mean([episode.recorded_reward for episode in own]), _mean([episode.reward for episode in own])]
        score = _ratio(Score.total(episode.score for episode in own))
        table.add_row(*map(Text, (printable(name), *counts, score, " -> ".join(dict.fromkeys(rewards)))))
    if len(tasks) > MAX_TASKS:
        table.caption = f"and {len(tasks) - MAX_TASKS} more tasks, in replay.json"
    return table


def _episode_lines(episode: ReplayedEpisode) -> Iterator[str]:
    yield f"{one_line(episode.recorded_id)}, attempt {episode.attempt}: {', '.join(_runs(episode.steps)) or 'no steps'}"
    if episode.outcome is not episode.recorded_outcome:
        yield f"  outcome {episode.outcome.value}; the recorded outcome was {episode.recorded_outcome.value}"
    if episode.reward != episode.recorded_reward:
        yield f"  reward {_shown(episode.reward)}; the recorded reward was {_shown(episode.recorded_reward)}"
    first = next((step for step in episode.steps if step.match is Match.DIFFERENT), None)
    if first is not None:
        yield f"  first difference at step {first.step}, in {one_line(first.where or '')} (- recorded, + now):"
        yield from (f"    {printable(line)}" for line in first.diff)


def _runs(steps: Sequence[StepComparison]) -> Iterator[str]:
    """Yields one description per sequence of equal results, such as `steps 0-3 exact` and `4 normalised (pids)`."""
    for number, ((match, names), group) in enumerate(groupby(steps, key=lambda one: (one.match, one.normalisers))):
        alike = list(group)
        first, last = alike[0].step, alike[-1].step
        place = str(first) if first == last else f"{first}-{last}"
        word = ("step " if first == last else "steps ") if number == 0 else ""
        yield f"{word}{place} {match.value}" + (f" ({', '.join(map(one_line, names))})" if names else "")


def _total_line(score: Score) -> str:
    if score.value is None:
        return "Determinism: no step could be compared."
    return f"Determinism {_ratio(score)}: {score.matching} of {score.compared} steps match."


def _ratio(score: Score) -> str:
    if score.value is None:
        return "-"
    return f"{score.value:.2f}" if score.value in (0.0, 1.0) else f"{min(max(score.value, 0.01), 0.99):.2f}"


def _mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return _shown(sum(known) / len(known) if known else None)


def _shown(reward: float | None) -> str:
    return "-" if reward is None else format_number(reward)
