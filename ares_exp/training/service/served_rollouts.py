"""The rollouts of a service, from their submission to the acknowledgement of their episodes.

A rollout is one requested episode of a task. It results in exactly one line of `GET /v1/episodes`. If an attempt at the
task fails or is too stale, another attempt of the same rollout can replace it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ares_exp.cancellation import in_thread
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import ConfigError
from ares_exp.records.results import UNFINISHED
from ares_exp.records.run_dir import dump_json
from ares_exp.records.secrets import MASK, scrub
from ares_exp.records.validation import explain_validation
from ares_exp.runs.scheduler import PlannedEpisode, Slot, episode_seed, plan_attempt
from ares_exp.runs.trainer import PauseScope
from ares_exp.training.driver import CANCEL_LIMIT_SEC, DrivenEpisode, EpisodeDriver
from ares_exp.training.service.bodies import (
    ErrorFacts,
    Keep,
    Loss,
    PolicyBody,
    ServiceState,
    State,
    SubmissionBody,
    episode_fields,
    error_of,
    state_of,
)
from ares_exp.training.service.rollout_policies import ENV, RolloutPolicies
from ares_exp.training.service.service_record import ServiceRecord

if TYPE_CHECKING:
    from ares_exp.training.service.serving import ServeOptions

LEASE_CHECK_SEC = 1.0
MAX_REPLACED = 16
"""Maximum number of attempts of one rollout that are replaced by another attempt."""
LEASE_EXPIRED = "LeaseExpired"
CANCELLED = "Cancelled"
MESSAGES = {
    CANCELLED: "The rollout was cancelled.",
    LEASE_EXPIRED: "The rollout was cancelled, because its trainer sent no call within `serve.lease_sec`.",
}

logger = logging.getLogger(__name__)


class FullError(Exception):
    """The service accepts no more rollouts at present."""


class ConflictError(Exception):
    """A submission reuses rollout ids of an earlier submission, but its other ids or its tasks are different."""


class UnknownError(LookupError):
    """There is no rollout or submission with this id."""


@dataclass(eq=False)
class ServedSubmission:
    """Rollouts that were submitted together.

    Attributes:
        body: The body of the submission. In a resumed run, API keys are masked.
        waiting: Rollouts that wait until they are passed to the scheduler.
        ready: Rollouts whose episodes are available and not acknowledged, by cursor, in order.
        given: Number of rollouts with an attempt that is queued or running in the scheduler.
        open: Number of rollouts whose episode is not available yet.
        lease_until: Time at which the lease expires, on the clock of the event loop.
        delivered: Cursor of the last delivered episode.
    """

    submission_id: str
    body: SubmissionBody
    rollouts: list[Rollout] = field(default_factory=list)
    waiting: deque[Rollout] = field(default_factory=deque)
    ready: dict[int, Rollout] = field(default_factory=dict)
    given: int = 0
    open: int = 0
    lease_until: float = 0.0
    delivered: int = 0


@dataclass(eq=False)
class Rollout:
    """One rollout: an episode of a task that a trainer has requested.

    Attributes:
        attempt: Number of the current attempt at the task.
        seed: Seed of the current attempt.
        policy: Endpoint of the rollout's LLM calls.
        submitted_at: Time of the submission, in epoch seconds.
        planned: Plan that continues the current attempt in a resumed run; `None` for a new attempt.
        is_given: Whether the current attempt is queued or running in the scheduler.
        calls: Number of responses in the current attempt.
        cursor: Cursor of the episode; `None` until it is available.
        cancelled_by: Reason for the cancellation; `None` if the rollout is not cancelled.
        keep: Content of the episode of a cancelled rollout.
        ended: Event that is set when the episode is available.
    """

    rollout_id: str
    submission: ServedSubmission
    task: str
    attempt: int
    seed: int
    policy: PolicyBody
    submitted_at: float
    planned: PlannedEpisode | None = field(default=None, repr=False)
    state: State = "waiting"
    is_given: bool = False
    calls: int = 0
    cursor: int | None = None
    losses: list[Loss] = field(default_factory=list)
    error: ErrorFacts | None = None
    cancelled_by: str | None = None
    keep: Keep = "nothing"
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def slot(self) -> Slot:
        """The task and the number of the attempt."""
        return self.task, self.attempt

    @property
    def lacks_key(self) -> bool:
        """Whether the trainer has to submit the rollout again, because only an earlier server process had its key."""
        return MASK in (self.policy.key, *self.policy.headers.values())


class ServedRollouts:
    """All rollouts of a service. Use it only on the event loop of the run.

    Attributes:
        policies: Policy of the run.
        options: Options of the service.
        changed: Event that is set when an episode becomes available. A new event then replaces it.
        failure: Future that gets the first error in storing an episode. Such an error ends the service.
    """

    def __init__(
        self, driver: EpisodeDriver, record: ServiceRecord, policies: RolloutPolicies, options: ServeOptions
    ) -> None:
        """Creates a service without rollouts."""
        self.submissions: dict[str, ServedSubmission] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.changed = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.options = options
        self._driver = driver
        self._record = record
        self.policies = policies
        self._submitting, self._publishing = asyncio.Lock(), asyncio.Lock()
        self._cursor, self._is_closing = 0, False
        self._indices: dict[str, int] = {}
        self._pauses: dict[PauseScope, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, body: SubmissionBody) -> ServedSubmission:
        """Accepts a submission, or returns the earlier submission with the same ids.

        Raises:
            FullError: The queue is full, or too many episodes are not acknowledged.
            ConflictError: Some of the ids belong to a different submission.
            UserError: The submission is invalid.
        """
        async with self._submitting:
            tasks = [task.name for task in body.tasks for _ in range(body.n)]
            if (again := self._submitted_before(body, tasks)) is not None:
                return again
            submission_id = uuid.uuid4().hex[:16]
            ids = body.rollout_ids or [f"{submission_id}-{number}" for number in range(len(tasks))]
            if len(ids) != len(tasks) or len(set(ids)) != len(ids):
                raise ConfigError(
                    f"Expected {len(tasks)} distinct rollout_ids for {len(body.tasks)} tasks with n={body.n}, got "
                    f"{len(ids)} with {len(set(ids))} distinct values."
                )
            self._check_room(len(tasks))
            await self.policies.check([_policy_of(body, one) for one in ids], needs_tokens=body.needs_tokens)
            for name in dict.fromkeys(tasks):
                self._driver.check(name)
            rollouts = []
            for number, (rollout_id, task) in enumerate(zip(ids, tasks, strict=True)):
                planned = self._driver.plan(task)
                seed = planned.seed if body.seed is None else episode_seed(body.seed, task, number % body.n)
                rollouts.append([rollout_id, task, planned.attempt, seed])
            line = {"submission": submission_id, "at": time.time(), "body": body, "rollouts": rollouts}
            await self._write({**line, "body": _without_keys(body)})
            self._apply(line)
            submission = self.submissions[submission_id]
            submission.waiting.extend(submission.rollouts)
            self._fill(submission)
            return submission

    async def restore(self) -> None:
        """Reads the rollouts of earlier sessions, and continues the rollouts that have no episode yet.

        Raises:
            ConfigError: The record cannot be read.
        """
        try:
            for line in await asyncio.to_thread(lambda: list(self._record.read())):
                self._apply(line)
        except (LookupError, TypeError, ValueError, ValidationError) as error:
            raise ConfigError(f"The recorded rollouts cannot be read: {type(error).__name__}: {error}") from None
        ready = {cursor for one in self.submissions.values() for cursor in one.ready}
        await asyncio.to_thread(lambda: self._record.remove_episodes(self._record.stored_episodes() - ready))
        for rollout in self.rollouts.values():
            if rollout.cursor is None:
                again = await self._driver.plan_again(rollout.slot, seed=rollout.seed)
                if isinstance(again, DrivenEpisode) or rollout.cancelled_by is not None:
                    self._spawn(self._settle(rollout, again if isinstance(again, DrivenEpisode) else None))
                else:
                    rollout.planned = again
                    rollout.submission.waiting.append(rollout)
        for submission in self.submissions.values():
            self._fill(submission)

    def _apply(self, line: Mapping[str, Any]) -> None:
        """Makes the change that a line of the record describes."""
        if "body" in line:
            body = SubmissionBody.model_validate(line["body"])
            submission = self.submissions[line["submission"]] = ServedSubmission(str(line["submission"]), body)
            for rollout_id, task, attempt, seed in line["rollouts"]:
                policy = _policy_of(body, rollout_id)
                made = Rollout(rollout_id, submission, task, int(attempt), int(seed), policy, float(line["at"]))
                submission.rollouts.append(made)
                self.rollouts[rollout_id] = made
            submission.open = len(submission.rollouts)
            self.renew([submission])
        elif "replaced" in line:
            rollout = self.rollouts[line["replaced"]]
            rollout.losses.append(Loss.model_validate(line["loss"]))
            rollout.attempt, rollout.seed = int(line["attempt"]), int(line["seed"])
        elif "cancel" in line:
            for rollout_id in line["cancel"]:
                self.rollouts[rollout_id].cancelled_by = str(line["why"])
                self.rollouts[rollout_id].keep = line["keep"]
        elif "ended" in line:
            rollout = self.rollouts[line["ended"]]
            self._cursor = rollout.cursor = int(line["cursor"])
            rollout.state = line["state"]
            rollout.submission.ready[rollout.cursor] = rollout
            rollout.submission.open -= 1
            rollout.ended.set()
        elif "acked" in line:
            self._free(int(line["acked"]), line["of"])
        elif "version" in line:
            self._indices[str(line["version"])] = int(line["index"])
            self.policies.version = str(line["version"])

    def selected(self, submission_id: str | None) -> Collection[ServedSubmission]:
        """Returns one submission, or all if the id is `None`. Raises `UnknownError` if it does not exist."""
        return self.submissions.values() if submission_id is None else [self.submission(submission_id)]

    def submission(self, submission_id: str) -> ServedSubmission:
        """Returns a submission. Raises `UnknownError` if it does not exist."""
        if (found := self.submissions.get(submission_id)) is None:
            raise UnknownError(f"There is no submission {submission_id!r:.200}.")
        return found

    def rollout(self, rollout_id: str) -> Rollout:
        """Returns a rollout. Raises `UnknownError` if it does not exist."""
        if (found := self.rollouts.get(rollout_id)) is None:
            raise UnknownError(f"There is no rollout {rollout_id!r:.200}.")
        return found

    def renew(self, submissions: Iterable[ServedSubmission]) -> None:
        """Renews the leases of submissions, because their trainer has sent a call."""
        now = asyncio.get_running_loop().time()
        for one in submissions:
            one.lease_until = now + (one.body.lease_sec or self.options.lease_sec)

    async def watch_leases(self) -> None:
        """Cancels the rollouts of submissions whose lease has expired. Never returns."""
        while True:
            await asyncio.sleep(LEASE_CHECK_SEC)
            now = asyncio.get_running_loop().time()
            for one in list(self.submissions.values()):
                if one.lease_until < now and (left := [each for each in one.rollouts if each.cursor is None]):
                    logger.warning(
                        "The trainer of submission %s sent no call for %g s. Its rollouts are cancelled.",
                        one.submission_id,
                        one.body.lease_sec or self.options.lease_sec,
                    )
                    one.lease_until = now + CANCEL_LIMIT_SEC
                    self._spawn(self.cancel(left, keep="nothing", why=LEASE_EXPIRED))

    async def cancel(self, rollouts: Sequence[Rollout], *, keep: Keep, why: str = CANCELLED) -> None:
        """Cancels rollouts, and waits until their containers are released, for at most `CANCEL_LIMIT_SEC`. Idempotent.

        Raises:
            TimeoutError: A container was not released in time.
        """
        due = [one for one in rollouts if one.cursor is None and one.cancelled_by is None]
        if due:
            line = {"cancel": [one.rollout_id for one in due], "keep": keep, "why": why}
            self._apply(line)
            await self._write(line)
        for one in due:
            if one in one.submission.waiting:
                one.submission.waiting.remove(one)
                self._spawn(self._settle(one, None))
            elif one.is_given:
                self._driver.run.cancel(one.slot)
        async with asyncio.timeout(CANCEL_LIMIT_SEC):
            for one in rollouts:
                await one.ended.wait()

    def available(self, submissions: Iterable[ServedSubmission], after: int) -> list[tuple[int, Rollout]]:
        """Returns the rollouts whose episodes come after a cursor and are not acknowledged, with cursors, in order."""
        return sorted((cursor, one) for each in submissions for cursor, one in each.ready.items() if cursor > after)

    async def line_at(self, cursor: int) -> bytes | None:
        """Returns the line of an episode; `None` if the episode has been acknowledged."""
        return await in_thread(lambda: self._record.episode(cursor))

    def delivered(self, submission: ServedSubmission, cursor: int) -> None:
        """Notes that the trainer has received an episode, so that another rollout of its submission can start."""
        submission.delivered = max(submission.delivered, cursor)
        self._fill(submission)

    async def acknowledge(self, cursor: int, of: str | None) -> int:
        """Deletes all episodes up to a cursor, of the submission `of` or of all. Returns their number."""
        freed = self._free(cursor, of)
        if freed:
            await self._write({"acked": cursor, "of": of})
            await in_thread(lambda: self._record.remove_episodes(freed))
        return len(freed)

    def _free(self, cursor: int, of: str | None) -> list[int]:
        freed = [(one, number) for one in self.selected(of) for number in one.ready if number <= cursor]
        for one, number in freed:
            del one.ready[number]
        return [number for _, number in freed]

    async def set_version(self, version: str, index: int | None) -> None:
        """Sets the version of the weights that generates responses from now on, and its number `index`.

        The default of `index` is `version` if it is a number, otherwise the largest known number plus 1.
        """
        number = index if index is not None else _index(version)
        if number is None:
            number = max(self._indices.values(), default=-1) + 1
        line = {"version": version, "index": number}
        await self._write(line)
        self._apply(line)

    async def pause(self, scope: PauseScope, *, drain_sec: float, for_sec: float) -> None:
        """Pauses LLM calls or the start of episodes for `for_sec` seconds.

        Then waits for at most `drain_sec` seconds until no call is in flight.
        """
        self.resume(scope)
        self._driver.run.pause(scope)
        self._pauses[scope] = asyncio.get_running_loop().call_later(for_sec, self.resume, scope)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_sec):
                while drain_sec and self.policies.in_flight:  # a call may have started before this task runs
                    await self.policies.drained.wait()

    def resume(self, scope: PauseScope) -> None:
        """Ends the pause of `scope`, if it is paused."""
        if (timer := self._pauses.pop(scope, None)) is not None:
            timer.cancel()
            self._driver.run.resume(scope)

    def state(self) -> ServiceState:
        """Returns the active pauses, the number of calls in flight, and the version of the weights."""
        now = asyncio.get_running_loop().time()
        paused: dict[str, float] = {scope: round(timer.when() - now, 3) for scope, timer in self._pauses.items()}
        return ServiceState(in_flight=self.policies.in_flight, paused=paused, version=self.policies.version)

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of running rollouts, waiting rollouts, and episodes that are not acknowledged."""
        left = sum(one.open for one in self.submissions.values())
        running = min(left, len(self._driver.run.running()))
        return running, left - running, sum(len(one.ready) for one in self.submissions.values())

    async def close(self) -> None:
        """Cancels running episodes, which a resumed run continues. Waits until all ended episodes are stored."""
        self._is_closing = True
        for rollout in [one for one in self.rollouts.values() if one.is_given]:
            self._driver.run.cancel(rollout.slot)
        for timer in self._pauses.values():
            timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_LIMIT_SEC)

    def _submitted_before(self, body: SubmissionBody, tasks: Sequence[str]) -> ServedSubmission | None:
        known = [self.rollouts[one] for one in body.rollout_ids or () if one in self.rollouts]
        if not known:
            return None
        submission = known[0].submission
        ids = [one.rollout_id for one in submission.rollouts]
        if ids != body.rollout_ids or [one.task for one in submission.rollouts] != tasks:
            raise ConflictError(
                f"The rollout id {known[0].rollout_id} belongs to submission {submission.submission_id}, whose tasks "
                "or ids differ. Use new rollout_ids, or exactly the tasks and ids of that submission."
            )
        for one in submission.rollouts:  # API keys are not recorded, so a new process of the server needs them again
            one.policy = _policy_of(body, one.rollout_id) if one.lacks_key else one.policy
        self.renew([submission])
        self._fill(submission)
        return submission

    def _check_room(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        running, waiting, _ = self.counts()
        kept = sum(len(one.ready) for one in self.submissions.values() if one.lease_until >= now)
        queue, most = self.options.queue, self.options.unacknowledged
        if count > queue:
            raise ConfigError(
                f"Expected a submission of at most {queue} rollouts, got {count}. Submit fewer, or raise `serve.queue`."
            )
        if running + waiting + count > queue:
            raise FullError(f"{running + waiting} rollouts run or wait (limit: {queue}). Wait, or raise `serve.queue`.")
        if kept + count > most:
            raise FullError(
                f"Trainers have not acknowledged {kept} episodes (limit: {most}). Acknowledge them, or raise "
                "`serve.unacknowledged`."
            )

    def _fill(self, submission: ServedSubmission) -> None:
        """Starts waiting rollouts of a submission, while fewer than `concurrency` are running or not yet delivered.

        Skips rollouts that lack an API key.
        """
        unread = sum(cursor > submission.delivered for cursor in submission.ready)
        for _ in range(len(submission.waiting)):
            if submission.given + unread >= self._driver.run.concurrency:
                return
            rollout = submission.waiting.popleft()
            if rollout.lacks_key:
                submission.waiting.append(rollout)
            else:
                self._start(rollout)

    def _start(self, rollout: Rollout) -> None:
        planned = rollout.planned or replace(plan_attempt(*rollout.slot, seed=0), seed=rollout.seed)
        planned = replace(planned, limits=self._limits(rollout.submission.body))
        rollout.calls, rollout.is_given = 0, True
        rollout.submission.given += 1
        self.policies.add(rollout.slot, rollout)
        self._driver.execute(planned, lambda _, episode: self._spawn(self._settle(rollout, episode)))

    def _limits(self, body: SubmissionBody) -> EpisodeLimits:
        limits, own = self._driver.run.limits, body.limits
        steps = own.steps if own.steps is not None else limits.steps
        if own.seconds is None:
            return replace(limits, steps=steps)
        time_limits = replace(
            limits.time, agent_timeout_sec=own.seconds, agent_timeout_max_sec=None, agent_timeout_multiplier=1.0
        )
        return replace(limits, steps=steps, time=time_limits)

    async def _settle(self, rollout: Rollout, episode: DrivenEpisode | None) -> None:
        """Stores an attempt's episode, or starts a replacement. Does neither if a resumed run continues the attempt."""
        try:
            rollout.submission.given -= rollout.is_given
            rollout.is_given = False
            await self.policies.remove(rollout.slot)
            is_unfinished = episode is None or episode.result.outcome in UNFINISHED
            is_ending = self._is_closing or self._driver.run.is_ending
            if is_unfinished and rollout.cancelled_by is None and is_ending:
                return  # a resumed run continues it
            state = self._state(rollout, episode)
            if self._is_replaced(rollout, state):
                assert episode is not None
                loss = Loss(attempt=rollout.attempt, state=state, error=error_of(episode.result))
                planned = self._driver.plan(rollout.task)
                again = {"attempt": planned.attempt, "seed": planned.seed, "loss": loss.model_dump()}
                line = {"replaced": rollout.rollout_id, **again}
                await self._write(line)
                self._apply(line)
                rollout.planned = None
                self._start(rollout)
                return
            await self._publish(rollout, state, episode)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            elif not self._is_closing:
                logger.warning("The end of rollout %s could not be stored: %s", rollout.rollout_id, error)

    def _state(self, rollout: Rollout, episode: DrivenEpisode | None) -> State:
        if episode is None:
            return "cancelled"
        state = state_of(episode.result)
        if state == "failed" and rollout.cancelled_by is not None:
            return "cancelled"
        most, age = rollout.submission.body.max_staleness, self._staleness(episode)
        is_stale = most is not None and age is not None and age > most
        return "stale" if is_stale and state in ("finished", "truncated") else state

    def _is_replaced(self, rollout: Rollout, state: State) -> bool:
        body = rollout.submission.body
        if rollout.cancelled_by is not None or len(rollout.losses) >= MAX_REPLACED:
            return False
        failed = sum(loss.state == "failed" for loss in rollout.losses)
        return (state == "failed" and failed < body.replace_failed) or (state == "stale" and body.on_stale == "replace")

    def _staleness(self, episode: DrivenEpisode) -> int | None:
        known, newest = self._ages(episode), self._indices.get(self.policies.version or "")
        return max(0, newest - min(known)) if known and newest is not None else None

    def _ages(self, episode: DrivenEpisode) -> list[int]:
        found = [self._indices.get(name, _index(name)) for name in episode.versions]
        return [one for one in found if one is not None]

    async def _publish(self, rollout: Rollout, state: State, episode: DrivenEpisode | None) -> None:
        """Stores the line of a rollout's episode on disk, and makes the episode available to the trainer."""
        fields = await asyncio.to_thread(self._fields, rollout, state, episode)
        text = await asyncio.to_thread(dump_json, fields)
        async with self._publishing:  # a reader relies on the order of the cursors
            cursor = self._cursor + 1
            line = {"ended": rollout.rollout_id, "cursor": cursor, "state": state, "attempt": rollout.attempt}
            whole = f'{{"cursor": {cursor}, {text[1:]}\n'
            await in_thread(lambda: self._record.add_episode(cursor, whole, line))
            rollout.error = ErrorFacts.model_validate(fields["error"]) if fields["error"] is not None else None
            self._apply(line)
        self.changed.set()
        self.changed = asyncio.Event()
        self._fill(rollout.submission)

    def _fields(self, rollout: Rollout, state: State, episode: DrivenEpisode | None) -> dict[str, Any]:
        """Returns all fields of a line except the cursor. This takes much CPU time for long episodes."""
        body, made = rollout.submission.body, dict[str, Any]()
        known = self._ages(episode) if episode is not None else []
        if episode is not None:
            is_kept = state != "cancelled" or rollout.keep == "calls"
            asked = body if is_kept else body.model_copy(update={"want": "reward"})
            temperature = rollout.policy.sampling.get("temperature", 1.0)
            made = episode_fields(episode, asked, temperature=temperature, submitted_at=rollout.submitted_at)
        if state == "cancelled":
            why = rollout.cancelled_by or CANCELLED
            made["error"] = {"stage": "agent", "type": why, "message": MESSAGES.get(why, why), "transient": False}
        empty: dict[str, Any] = {
            **dict.fromkeys(("episode_id", "reward", "error", "finish", "rows", "calls", "trajectory")),
            "attempt": rollout.attempt,
            "rewards": {},
            "versions": [],
            "times": dict.fromkeys(("queue", "start", "engine", "tools", "verify"), 0.0),
            "tokens": {"prompt": 0, "sampled": 0},
        }
        return {
            "rollout_id": rollout.rollout_id,
            "submission_id": rollout.submission.submission_id,
            "group_id": body.group_id,
            "task": rollout.task,
            "state": state,
            **empty,
            **made,
            "trainable": bool(made.get("trainable")) and state in ("finished", "truncated"),
            "replaces": rollout.losses[-1].attempt if rollout.losses else None,
            "losses": [loss.model_dump() for loss in rollout.losses],
            "version_min": min(known, default=None),
            "version_max": max(known, default=None),
            "staleness": self._staleness(episode) if episode is not None else None,
            "encoding": body.encoding,
            "metadata": body.metadata,
        }

    async def _write(self, line: Mapping[str, Any]) -> None:
        await in_thread(lambda: self._record.append(line))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _index(version: str) -> int | None:
    return int(version) if version.isascii() and version.isdecimal() and len(version) < 16 else None


def _policy_of(body: SubmissionBody, rollout_id: str) -> PolicyBody:
    """Returns the submission's `policy`, with the changes in `policies` for this rollout.

    Raises `ConfigError` if the changes are invalid.
    """
    own = body.policies.get(rollout_id)
    if own is None:
        return body.policy
    try:
        return PolicyBody.model_validate({**body.policy.model_dump(), **own})
    except ValidationError as error:
        raise ConfigError(f"`policies` is invalid: {explain_validation(error, within=rollout_id)}.") from None


def _without_keys(body: SubmissionBody) -> dict[str, Any]:
    """Converts a submission to data for the record. Masks API keys, but not names of environment variables."""
    data = body.model_dump()
    for policy in (data["policy"], *data["policies"].values()):
        if policy.get("key") and not str(policy["key"]).startswith(ENV):
            policy["key"] = MASK
        policy["headers"] = scrub(policy.get("headers") or {})
    return data
