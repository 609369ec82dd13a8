"""Branches (`branch_from=<run>/<episode>@<step>`): episodes that continue from one step of a recorded episode.

If the recorded run has a snapshot of the step, the branches start from this snapshot. Otherwise, the run first repeats
the recorded episode up to the step, using the recorded responses, and takes a snapshot. All branches therefore start
from the same state. If the agent cannot be restored from a snapshot, each branch repeats the earlier steps in its own
container.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ares_exp.agents.code_agent import AgentFactoryBase
from ares_exp.agents.runtime.journal import DoneEntry, decode_journal
from ares_exp.environment import MinimalEnvironment, complete
from ares_exp.environments.restoring import Continuation, EpisodeStart, Rerun
from ares_exp.errors import (
    ConfigError,
    EpisodeError,
    SnapshotError,
    SnapshotMismatchError,
    TrajectoryFormatError,
    UserError,
)
from ares_exp.llms.request import LLMClient, LLMRequest, MessageEdit, recorded_edits
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.policy import AdvancingClient, EpisodeSpec, Policy
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.resume.recorded_run import EpisodeRef
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.trajectories.recorded_responses import recorded_exchanges, responses
from ares_exp.trajectories.records import EpisodeTrajectory

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """Changes that every branch makes at the branching point. `None` means no change.

    Attributes:
        inject: User message that is appended to the request that the agent sends at the branching point.
        edit: New text for the last message of this request.
        response: Text that the agent receives in response to this request, instead of a response from the policy.
    """

    inject: str | None = None
    edit: str | None = None
    response: str | None = None

    def edits(self, messages: int, step: int) -> tuple[MessageEdit, ...]:
        """Returns `edit` and `inject` as message edits, which apply to the request at `step` and to all later requests.

        `messages` is the number of messages in the request at `step`.
        """
        edits = []
        if self.edit is not None:
            edits.append(MessageEdit("replace", messages - 1, self.edit, step))
        if self.inject is not None:
            edits.append(MessageEdit("insert", messages, self.inject, step))
        return tuple(edits)


class Branching:
    """The branching point of a run: the step of a recorded episode at which all episodes of the run start.

    Attributes:
        step: Step at which the branches start.
        task_name: Name of the recorded episode's task.
    """

    def __init__(self, reference: str, options: BranchOptions) -> None:
        """Finds the recorded episode that `reference` (`<run>/<episode>@<step>`) names.

        Raises:
            ConfigError: The reference is invalid, or the run or episode does not exist.
        """
        ref = EpisodeRef.parse(reference)
        if ref.episode is None or ref.step is None:
            raise ConfigError(f"Expected `branch_from=<run>/<episode>@<step>`, got {reference!r:.200}.")
        self._run_dir = RunDir(ref.run.path)
        self._episode = ref.episode
        self.task_name = ref.episode.task_name
        self.step = ref.step
        self._options = options
        self._start: Callable[[Mapping[str, Any], tuple[MessageEdit, ...]], EpisodeStart]
        self._origin: Mapping[str, Any] = {}
        self._edits: tuple[MessageEdit, ...] = ()
        self._earlier_responses: tuple[LLMResponse, ...] = ()

    async def prepare(
        self,
        agents: AgentFactoryBase,
        make: Callable[[EpisodeStart], MinimalEnvironment],
        check: Callable[[EpisodeStart], None],
        store: Path,
        report: Report,
    ) -> None:
        """Finds or takes the snapshot at which the branches start. Call this once, before the first branch starts.

        If the agent cannot be restored from a snapshot, reads the recorded responses instead. Each branch then replays
        them up to the step.

        Args:
            agents: Factory of the branches' agents.
            make: Function that creates an environment from a starting point.
            check: Blocking function that raises an error if no episode can start at a starting point.
            store: Directory for the new snapshot. An earlier session of the run may already have stored it there.
            report: Function that is called with messages for the user.

        Raises:
            UserError: No snapshot exists and none can be taken. The message explains why.
        """
        try:
            if not agents.can_be_restored:
                self._start_from_start(await asyncio.to_thread(self._recorded, agents), report)
                return
            snapshot = await asyncio.to_thread(self._nearest, store)
            if snapshot is None or snapshot.step_count != self.step:
                recorded = await asyncio.to_thread(self._recorded, agents)
                edits = recorded_edits(recorded.metadata)
                start = self._repetition(recorded, _origin(recorded), edits, report, snapshot)
                async with complete(make(start)) as environment:
                    await environment.reset()
                    name = f"{self._episode.episode_id}@{self.step}"
                    snapshot = await environment.export_state(store, snapshot_id=name)
            await asyncio.to_thread(check, Continuation(snapshot))
            await asyncio.to_thread(self._start_from_snapshot, snapshot)
        except (SnapshotError, EpisodeError, TrajectoryFormatError) as error:
            name = f"{self._run_dir.path / self._episode.episode_id}@{self.step}"
            raise UserError(f"Cannot branch from {name}: {error}") from error

    def _start_from_snapshot(self, snapshot: EnvironmentSnapshot) -> None:
        self._edits = self._options.edits(len(snapshot.agent_messages), self.step)
        self._origin = {**snapshot.lineage, "snapshot": snapshot.snapshot_id}
        self._earlier_responses = _responses_in(snapshot)
        self._start = lambda lineage, edits: Continuation(snapshot, lineage=lineage, edits=edits)

    def _start_from_start(self, recorded: EpisodeTrajectory, report: Report) -> None:
        pending = recorded.steps[self.step].observation or {}
        new = self._options.edits(len(pending.get("messages", ())), self.step)
        self._edits = (*recorded_edits(recorded.metadata), *new)
        self._origin = _origin(recorded)
        self._earlier_responses = tuple(responses(recorded_exchanges(recorded)[: self.step]))
        self._start = lambda lineage, edits: self._repetition(recorded, lineage, edits, report)

    def _repetition(
        self,
        recorded: EpisodeTrajectory,
        lineage: Mapping[str, Any],
        edits: tuple[MessageEdit, ...],
        report: Report,
        snapshot: EnvironmentSnapshot | None = None,
    ) -> Rerun:
        seed = recorded.metadata.get("seed", 0)
        return Rerun(
            self.task_name,
            recorded_exchanges(recorded),
            self.step,
            seed=seed if isinstance(seed, int) else 0,
            lineage=lineage,
            edits=edits,
            snapshot=Continuation(snapshot) if snapshot is not None else None,
            report=report,
        )

    def start(self, branch: int) -> EpisodeStart:
        """Returns the starting point of branch number `branch`: a snapshot, or a replay of the recorded responses.

        Call `prepare` first.
        """
        parent = self._episode.episode_id
        lineage: dict[str, Any] = {
            "root": str(self._origin.get("root") or parent),
            "parent": parent,
            "step": self.step,
            "branch": branch,
            **({"snapshot": self._origin["snapshot"]} if "snapshot" in self._origin else {}),
            **({"edits": [edit.to_dict() for edit in self._edits]} if self._edits else {}),
        }
        return self._start(lineage, self._edits)

    def policy(self, policy: Policy, episode: EpisodeSpec) -> LLMClient:
        """Creates the client through which a branch sends its requests to the policy.

        The policy also gets the responses from before the branching point, because some policies add their earlier
        reasoning to requests. If the options contain a fixed `response`, it is the first response of the client.
        """
        client = policy.for_episode(replace(episode, earlier=self._earlier_responses))
        return client if self._options.response is None else _FirstResponse(self._options.response, client)

    def _nearest(self, made: Path) -> EnvironmentSnapshot | None:
        """Returns the snapshot of the step from the recorded run or from the directory `made`. Blocking.

        If neither has a snapshot of this step, returns the latest snapshot of an earlier step; `None` if there is none.
        """
        from ares_exp.snapshots.store import SnapshotStore

        found = SnapshotStore(self._run_dir.snapshots).nearest(self._episode.episode_id, self.step)
        if found is not None and found.step_count == self.step:
            return found
        return SnapshotStore(made).nearest(self._episode.episode_id, self.step) or found

    def _recorded(self, agents: AgentFactoryBase) -> EpisodeTrajectory:
        from ares_exp.trajectories.stored_episodes import load

        episodes = load(self._run_dir.path, partial=True, skip_broken=True)
        stored = next((one for one in episodes if one.episode_id == self._episode.episode_id), None)
        if stored is None:
            raise SnapshotError(
                f"the run has no snapshot of step {self.step}, and no trajectory from which the episode "
                "could run again. In the next run, use `snapshot=every_step` or a collector."
            )
        recorded = stored.load()
        if (was := recorded.metadata.get("agent")) not in (None, agents.name):
            raise SnapshotMismatchError(
                f"its agent was {was!r:.100}, and agent={agents.name} cannot replay the responses up to that step."
            )
        return recorded


class _FirstResponse:
    def __init__(self, text: str, client: LLMClient) -> None:
        self._text: str | None = text
        self._client = client

    @property
    def max_concurrency_per_episode(self) -> int:
        return concurrency_of(self._client)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        text, self._text = self._text, None
        return LLMResponse.from_text(text) if text is not None else await self._client(request)

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        """Notifies the client of a request that was replayed from the log of an earlier session.

        The first request is left out, because it got the fixed response instead of a response from the client.
        """
        text, self._text = self._text, None
        if text is None and isinstance(self._client, AdvancingClient):
            self._client.advance(request, response)


def _responses_in(snapshot: EnvironmentSnapshot) -> tuple[LLMResponse, ...]:
    """Reads the agent's responses from before a snapshot from the journals in the snapshot. Blocking."""
    objects, where = snapshot.object_store, str(snapshot.snapshot_dir)
    journals = (
        decode_journal(objects.get_lines(lines), started_at=0.0, seed=0, where=where)
        for lines in (*snapshot.past_journals, snapshot.journal)
    )
    values = (entry.value for journal in journals for entry in journal.entries if isinstance(entry, DoneEntry))
    return tuple(value for value in values if isinstance(value, LLMResponse))


def _origin(recorded: EpisodeTrajectory) -> Mapping[str, Any]:
    lineage = recorded.metadata.get("lineage")
    return {"root": lineage.get("root")} if isinstance(lineage, Mapping) else {}
