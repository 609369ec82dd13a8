"""`branch_from=<run>/<episode>@<step>`: several episodes that continue from one step of a recorded one.

If the recorded run has a snapshot of that step, the branches start from it. Otherwise the episode is played again up to
that step, from its last earlier snapshot or from its beginning, with the recorded answers; then a snapshot is taken, so
that all branches start from the same state. Where the agent cannot go on from a snapshot, each branch is played again
by itself, in a container of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.agents.code_agent import AgentFactoryBase
from ares_exp.asking.asked_ahead import concurrency_of
from ares_exp.environment import EnvironmentWrapper, MinimalEnvironment
from ares_exp.environments.playing_again import EpisodeStart, PlayedAgain
from ares_exp.environments.restoring import Continuation
from ares_exp.errors import (
    ConfigError,
    EpisodeError,
    SnapshotError,
    SnapshotMismatchError,
    TrajectoryFormatError,
    UserError,
)
from ares_exp.journal.encoding import decode_journal
from ares_exp.journal.journal import DoneEntry
from ares_exp.llms.message_edit import MessageEdit, edited, recorded_edits
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import AdvancingClient, RememberingClient
from ares_exp.records.run_dir import RunDir
from ares_exp.resume.answer_log import Exchange
from ares_exp.resume.episode_ref import EpisodeRef
from ares_exp.snapshots.nearest import nearest_snapshot
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.terminal.terminal import count_of
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_response, serialize_llm_request
from ares_exp.trajectories.request_diff import Match, RequestComparison

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """Changes at the start of the branches, compared with the recorded episode; `None` means no such change.

    Attributes:
        inject: A user message after those of the pending request.
        edit: New text for the pending request's last message.
        response: A fixed first response, instead of the policy's.
    """

    inject: str | None = None
    edit: str | None = None
    response: str | None = None

    def edits(self, messages: int, step: int) -> tuple[MessageEdit, ...]:
        """Returns the message edits that apply from `step` on, whose request has `messages` messages."""
        edits = []
        if self.edit is not None:
            edits.append(MessageEdit("replace", messages - 1, self.edit, step))
        if self.inject is not None:
            edits.append(MessageEdit("insert", messages, self.inject, step))
        return tuple(edits)


class Branching:
    """The point at which the episodes of a run begin."""

    def __init__(self, reference: str, options: BranchOptions) -> None:
        """Finds the recorded episode.

        Args:
            reference: `<run>/<episode>@<step>`.
            options: Changes at the start of the branches.

        Raises:
            ConfigError: There is no such run, episode or step.
        """
        ref = EpisodeRef.parse(reference)
        if ref.episode is None or ref.step is None:
            raise ConfigError(f"Expected `branch_from=<run>/<episode>@<step>`, got {reference!r:.200}.")
        self._run_dir = RunDir(ref.run.path)
        self._episode = ref.episode
        self._step = ref.step
        self._options = options
        self._snapshot: EnvironmentSnapshot | None = None
        self._played_again: _Recording | None = None
        self._messages = 0
        self._root: str | None = None
        self._earlier_edits: tuple[MessageEdit, ...] = ()
        self._earlier_answers: tuple[LLMResponse, ...] = ()

    @property
    def step(self) -> int:
        """The step at which the branches begin."""
        return self._step

    @property
    def task_name(self) -> str:
        """The task of the recorded episode."""
        return self._episode.task_name

    async def prepare(
        self,
        agents: AgentFactoryBase,
        make: Callable[[Continuation | None, int], MinimalEnvironment],
        check: Callable[[Continuation], None],
        store: Path,
        report: Report,
    ) -> None:
        """Finds or makes the snapshot that the branches start from, or the answers that they are played again with.

        Args:
            agents: Makes their agents.
            make: Makes an environment that starts, or continues, with that seed, for playing the episode again.
            check: Raises when no episode can continue there. Blocking.
            store: Directory for a new snapshot, also if an earlier session of the run made it.
            report: Receives messages for the user.

        Raises:
            UserError: The snapshot can neither be found nor made; the message says why.
        """
        try:
            if not agents.can_be_restored:
                await self._read_answers(agents, report)
                return
            self._snapshot = await asyncio.to_thread(self._nearest, store)
            if self._snapshot is None or self._snapshot.step_count != self._step:
                self._snapshot = await self._play_again(make, store, report)
            await asyncio.to_thread(check, Continuation(self._snapshot))
            shown = edited(
                LLMRequest(await asyncio.to_thread(lambda: self._snapshot_at_hand.agent_messages)),
                self._earlier_edits,
                self._step,
            )
            self._messages = len(shown.messages)
            self._earlier_answers = await asyncio.to_thread(lambda: _answers_in(self._snapshot_at_hand))
        except (SnapshotError, EpisodeError, TrajectoryFormatError) as error:
            name = f"{self._run_dir.path / self._episode.episode_id}@{self._step}"
            raise UserError(f"Cannot branch from {name}: {error}") from error

    async def _read_answers(self, agents: AgentFactoryBase, report: Report) -> None:
        """Reads the answers that each branch is played again with."""
        recorded = await asyncio.to_thread(self._recorded)
        if (was := recorded.metadata.get("agent")) not in (None, agents.name):
            raise SnapshotMismatchError(
                f"its agent was {was!r:.100}, whose answers cannot be given to agent={agents.name} up to that step."
            )
        pending = recorded.steps[self._step].observation or {}
        self._messages = len(pending.get("messages", ()))
        self._note_origin(recorded)
        self._earlier_answers = tuple(_answer(recorded, step) for step in range(self._step))
        self._played_again = _Recording(_exchanges(recorded), _seed_of(recorded), report)

    def start(self, branch: int) -> EpisodeStart:
        """Returns the starting point of a branch."""
        snapshot, again, parent = self._snapshot, self._played_again, self._episode.episode_id
        assert snapshot is not None or again is not None, "prepare() comes first"
        root = self._root if snapshot is None else snapshot.lineage.get("root", self._root)
        lineage: dict[str, Any] = {
            "root": str(root or parent),
            "parent": parent,
            "step": self._step,
            "branch": branch,
            **({} if snapshot is None else {"snapshot": snapshot.snapshot_id}),
        }
        new = self._options.edits(self._messages, self._step)
        if edits := (*self._earlier_edits, *new):
            lineage["edits"] = [edit.to_dict() for edit in edits]
        if snapshot is not None:
            return Continuation(snapshot, lineage=lineage, edits=edits)
        assert again is not None
        return PlayedAgain(
            self.task_name,
            again.exchanges,
            self._step,
            seed=again.seed,
            lineage=lineage,
            edits=edits,
            report=again.report,
        )

    def policy(self, client: LLMClient) -> LLMClient:
        """Returns the policy of a branch, told of the answers before it; one that gives a given answer first."""
        if isinstance(client, RememberingClient):
            for answer in self._earlier_answers:
                client.remember(answer)
        return client if self._options.response is None else _FirstAnswer(self._options.response, client)

    @property
    def _snapshot_at_hand(self) -> EnvironmentSnapshot:
        assert self._snapshot is not None, "prepare() comes first"
        return self._snapshot

    def _nearest(self, made: Path) -> EnvironmentSnapshot | None:
        """Returns the recorded snapshot of the step, one made from it, or the last earlier one. Blocking."""
        found = nearest_snapshot(self._run_dir.snapshots, self._episode.episode_id, self._step)
        if found is not None and found.step_count == self._step:
            return found
        return nearest_snapshot(made, self._episode.episode_id, self._step) or found

    async def _play_again(
        self, make: Callable[[Continuation | None, int], MinimalEnvironment], store: Path, report: Report
    ) -> EnvironmentSnapshot:
        recorded = await asyncio.to_thread(self._recorded)
        begin = Continuation(self._snapshot) if self._snapshot is not None else None
        if begin is None:  # a snapshot of a branch knows both itself
            self._note_origin(recorded)
        async with EnvironmentWrapper(make(begin, _seed_of(recorded))) as environment:
            time_step = await environment.reset()
            comparison, differing = RequestComparison(), []
            for step in range(environment.step_count, self._step + 1):
                request = time_step.observation
                if request is None:
                    raise SnapshotError(
                        f"played again with the recorded answers, the episode ended at step {step}. Its run had no "
                        "snapshot to start from: `snapshot=every_step` takes them."
                    )
                request = edited(request, self._earlier_edits, step)
                observed, asked = recorded.steps[step].observation or {}, serialize_llm_request(request)
                if comparison.compare(step, observed, asked).match is Match.DIFFERENT:
                    differing.append(step)
                if step < self._step:
                    time_step = await environment.step(_answer(recorded, step))
            if differing:
                requests = count_of(len(differing), "request")
                report(
                    f"branch_from: played again up to step {self._step}, the episode differs from the recorded one in "
                    f"{requests}, from step {differing[0]} on. The branches go on from what it is now."
                )
            return await environment.export_state(store, snapshot_id=f"{self._episode.episode_id}@{self._step}")

    def _note_origin(self, recorded: EpisodeTrajectory) -> None:
        """Notes what the recorded episode was branched off itself, and how its conversation was edited."""
        self._earlier_edits = recorded_edits(recorded.metadata)
        lineage = recorded.metadata.get("lineage")
        self._root = lineage.get("root") if isinstance(lineage, Mapping) else None

    def _recorded(self) -> EpisodeTrajectory:
        from ares_exp.trajectories.stored_episodes import load

        for stored in load(self._run_dir.path, partial=True, skip_broken=True):
            if stored.episode_id == self._episode.episode_id:
                return stored.load()
        raise SnapshotError(
            f"the run has neither a snapshot of step {self._step} nor a trajectory of the episode, with which it could "
            "be played again. Use `snapshot=every_step`, or a collector, in the run to be branched."
        )


@dataclass(frozen=True, slots=True)
class _Recording:
    """What branches are played again with, and who hears how that went."""

    exchanges: Sequence[Exchange]
    seed: int
    report: Report


class _FirstAnswer:
    """An LLM client with a fixed first answer."""

    def __init__(self, text: str, client: LLMClient) -> None:
        self._text: str | None = text
        self._client = client

    @property
    def max_concurrency_per_episode(self) -> int:
        """As the client's: the first request is asked for first."""
        return concurrency_of(self._client)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        text, self._text = self._text, None
        return LLMResponse.from_text(text) if text is not None else await self._client(request)

    def advance(self, request: LLMRequest, answer: LLMResponse | None) -> None:
        """Skips an answer that was given instead of this client's."""
        text, self._text = self._text, None
        if text is None and isinstance(self._client, AdvancingClient):
            self._client.advance(request, answer)


def _answers_in(snapshot: EnvironmentSnapshot) -> tuple[LLMResponse, ...]:
    """Returns the answers that the agent had got, as far as the snapshot has them: in its journals. Blocking."""
    objects, where = snapshot.object_store, str(snapshot.snapshot_dir)
    journals = (
        decode_journal(objects.get_lines(lines), started_at=0.0, seed=0, where=where)
        for lines in (*snapshot.past_journals, snapshot.journal)
    )
    values = (entry.value for journal in journals for entry in journal.entries if isinstance(entry, DoneEntry))
    return tuple(value for value in values if isinstance(value, LLMResponse))


def _answer(recorded: EpisodeTrajectory, step: int) -> LLMResponse:
    """Returns the recorded answer to the request of that step."""
    steps: Sequence[Any] = recorded.steps
    action = steps[step + 1].action if step + 1 < len(steps) else None
    if action is None:
        raise SnapshotError(f"the recorded trajectory has no answer after step {step}.")
    return deserialize_llm_response(action)


def _exchanges(recorded: EpisodeTrajectory) -> list[Exchange]:
    """Returns the recorded requests with their answers."""
    steps: Sequence[Any] = recorded.steps
    return [
        Exchange(step.observation, deserialize_llm_response(after.action))
        for step, after in itertools.pairwise(steps)
        if step.observation is not None and after.action is not None
    ]


def _seed_of(recorded: EpisodeTrajectory) -> int:
    seed = recorded.metadata.get("seed", 0)
    return seed if isinstance(seed, int) else 0
