"""A run under control: the effects of orders in its directory, and their log."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import TimeStep
from ares_exp.errors import UnreachableError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.results import RunSummary
from ares_exp.runs.control import run_control
from ares_exp.runs.control.orders import Order, Verb, watch, write_order
from ares_exp.runs.control.status import RunStatus, read_status
from ares_exp.runs.executors.executor import LocalExecutor, Place, make_here
from tests.closed_port import closed_port
from tests.unit.runs.test_experiment import OneStep, Ready, Responses, Source, execute, experiment, rows

LIMIT_SEC = 30


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_control, "LOOK_SEC", 0.01)
    monkeypatch.setattr(run_control, "WATCHED_WRITE_SEC", 0.01)


class Asked(Responses):
    """Answers when it is released.

    Attributes:
        asked: The tasks of the requests that it got, in order.
        answering: While it is set, requests are answered.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answering = asyncio.Event()

    def for_episode(self, episode: EpisodeSpec) -> Any:
        async def respond(request: LLMRequest) -> LLMResponse:
            self.asked.append(episode.task_name)
            await self.answering.wait()
            return await self(request)

        return respond


class Steps(OneStep):
    """Takes three responses."""

    left = 3

    async def step(self, action: Any) -> TimeStep[Any]:
        self.left -= 1
        return await super().step(action) if self.left == 0 else TimeStep("MID", None, 1.0, LLMRequest([]))


class StepsSource(Source):
    def make(self, task_name: str, parts: object) -> OneStep:
        return Steps(task_name, self.trouble)


class Controlled:
    """An experiment that is run while a test gives orders."""

    def __init__(self, path: Path, **parts: Any) -> None:
        self.path = path
        self.policy = Asked()
        self.made = experiment(path, **{"policy": self.policy, **parts})
        self.running: asyncio.Task[RunSummary] | None = None

    async def until(self, is_so: Callable[[], Any]) -> None:
        """Waits; fails with the run, if that ends with an error."""
        async with asyncio.timeout(LIMIT_SEC):
            while not is_so():
                if self.running is not None and self.running.done():
                    self.running.result()
                await asyncio.sleep(0.005)

    @property
    def status(self) -> RunStatus | None:
        return read_status(self.path / "run" / "status.json")

    def noted(self) -> list[dict[str, Any]]:
        path = self.path / "run" / "control.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def order(self, verb: Verb, **more: Any) -> dict[str, Any]:
        order = Order.new(verb, **more)
        write_order(self.path / "run" / "control", order)
        await self.until(lambda: any(line.get("id") == order.id for line in self.noted()))
        return next(line for line in self.noted() if line.get("id") == order.id)

    async def end(self) -> RunSummary:
        """Has the policy answer, and returns the summary."""
        self.policy.answering.set()
        assert self.running is not None
        async with asyncio.timeout(LIMIT_SEC):
            return await self.running


@asynccontextmanager
async def controlled(path: Path, **parts: Any) -> AsyncIterator[Controlled]:
    run = Controlled(path, **parts)
    run.running = asyncio.create_task(execute(run.made, path))
    try:
        yield run
    finally:
        run.made.interrupt()
        await asyncio.wait({run.running}, timeout=LIMIT_SEC)


async def test_pause_finishes_running_episodes_and_starts_none(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=5, concurrency=2) as run:
        await run.until(lambda: len(run.policy.asked) == 2)
        noted = await run.order("pause", reason="lunch")
        assert (noted["outcome"], noted["reason"]) == ("done", "lunch")
        assert "2 running episodes will continue" in noted["says"]
        await run.until(lambda: run.status is not None and run.status.state == "pausing")
        run.policy.answering.set()
        await run.until(lambda: run.status is not None and run.status.state == "paused")
        assert run.status is not None
        assert (run.status.ended, run.status.queued, run.status.running) == (2, 3, 0)
        assert run.status.held is not None
        assert run.status.held.reason == "lunch"
        assert len(rows(tmp_path)) == 2
        assert "Resumed" in (await run.order("resume"))["says"]
        summary = await run.end()
        assert len(summary.scored) == 5
        assert len(run.policy.asked) == 5
        assert run.status.state == "ended"
    assert [line["verb"] for line in run.noted()] == ["pause", "resume"]


async def test_held_run_stops_requests_and_time_limits(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=2, concurrency=1, source=StepsSource(2, no_delay)) as run:
        await run.until(lambda: len(run.policy.asked) == 1)
        await run.order("pause", now=True)
        run.policy.answering.set()  # the pending response arrives and is applied
        held = run.made._running[next(iter(run.made._running))]
        await run.until(lambda: held.held_sec > 1)
        assert len(run.policy.asked) == 1
        assert held.deadline is not None
        assert not held.is_time_up
        await run.order("resume")
        summary = await run.end()
    assert len(summary.scored) == 2
    assert len(run.policy.asked) == 6
    phases = [row["phase_sec"] for row in rows(tmp_path)]
    assert phases[0]["paused"] > 1
    assert "paused" not in phases[1]


async def no_delay(where: str) -> None: ...


async def test_outage_of_the_endpoint_is_shown_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenAIPolicy, "preflight", Ready.preflight)
    with closed_port() as port:
        policy = OpenAIPolicy(model="m", base_url=f"http://127.0.0.1:{port}/v1", api_key_env=None)
        with pytest.raises(UnreachableError):  # imports the client, before the time limit runs
            await policy._endpoint.check_reachable()
        async with controlled(tmp_path, count=9, policy=policy, policy_timeout_sec=2) as run:
            await run.until(lambda: run.status is not None and run.status.outage)
            assert "No command has paused the run. GET " in (await run.order("resume"))["says"]
            await run.until(lambda: run.status is not None and run.status.state == "paused")
    *_, row = rows(tmp_path)
    assert len(rows(tmp_path)) < 9
    assert (row["outcome"], row["error"]["type"]) == ("policy_error", "EndpointUnreachableError")
    assert row["error"]["message"].endswith("It did not respond within timeouts.policy=2 seconds.")


async def test_timed_pause_ends_automatically(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=3) as run:
        await run.until(lambda: run.policy.asked)
        await run.order("pause", now=True, for_sec=0.2)
        assert len((await run.end()).scored) == 3


async def test_soft_pause_after_hard_allows_requests(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=1, source=StepsSource(1, no_delay)) as run:
        await run.until(lambda: run.policy.asked)
        await run.order("pause", now=True)
        await run.order("pause")
        assert len((await run.end()).scored) == 1


async def test_stop_and_ctrl_c_end_a_paused_run(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=3) as run:
        await run.until(lambda: run.policy.asked)
        await run.order("pause")
        noted = await run.order("stop")
        summary = await run.end()
    assert noted["outcome"] == "done"
    assert summary.interrupted
    assert [row["outcome"] for row in rows(tmp_path)] == ["cancelled"]
    assert run.status is not None
    assert run.status.state == "ended"


async def test_orders_before_and_after_a_session_are_refused(tmp_path: Path) -> None:
    inbox = tmp_path / "run" / "control"
    inbox.parent.mkdir()
    write_order(inbox, Order.new("pause"))
    async with controlled(tmp_path, count=1) as run:
        await run.until(lambda: run.policy.asked and run.noted())
        assert run.status is not None
        assert run.status.held is None
        run.made._scheduler.pause()  # nothing looks at the inbox between the order and the end
        write_order(inbox, Order.new("pause"))
        run.made.interrupt()
        await run.end()
    assert [line["outcome"] for line in run.noted()] in (["refused", "refused"], ["refused", "done"])
    assert [path.name for path in inbox.iterdir()] == []


async def test_invalid_order_warns_and_the_run_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with controlled(tmp_path, count=1) as run:
        await run.until(lambda: run.policy.asked and run.status is not None)
        inbox = tmp_path / "run" / "control"
        inbox.mkdir(exist_ok=True)
        for number in range(50):
            (inbox / f"{number:02}.json").symlink_to("/etc/passwd")
        await run.until(lambda: not any(inbox.iterdir()) and run.noted())
        assert len((await run.end()).scored) == 1
    told = [record.message for record in caplog.records if "Ignored" in record.message]
    assert 1 <= len(told) <= 3
    assert "expected a regular file" in told[0]
    assert len(run.noted()) == len(told)


async def test_all_jobs_of_a_sweep_log_orders(tmp_path: Path) -> None:
    sweep_dir = tmp_path / "sweep"
    write_order(make_folder(sweep_dir) / "control", Order.new("pause"))
    runs = [Controlled(make_folder(tmp_path / name), count=3) for name in ("a", "b")]
    for run in runs:
        run.made._settings = replace(run.made._settings, sweep_dir=sweep_dir)
        run.running = asyncio.create_task(execute(run.made, run.path))
    for run in runs:
        await run.until(lambda run=run: run.status is not None and run.status.state == "paused")
        assert run.policy.asked == []
    (sweep_dir / "stop").touch()
    for run in runs:
        assert (await run.end()).interrupted
        assert [line["verb"] for line in run.noted()] == ["pause", "stop"]


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


async def test_disk_without_room_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "status.json")

    monkeypatch.setattr(run_control, "write_status", full)
    async with controlled(tmp_path, count=2) as run:
        assert len((await run.end()).scored) == 2
    assert sum("cannot be written" in record.message for record in caplog.records if record.levelname == "WARNING") == 1


async def test_concurrency_changes_without_interrupting_episodes(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=12, concurrency=2) as run:
        await run.until(lambda: len(run.policy.asked) == 2)
        noted = await run.order("set", values={"concurrency": 8})
        assert noted["says"] == "The run now uses concurrency=8."
        await run.until(lambda: len(run.policy.asked) == 8)
        await run.order("set", values={"concurrency": 1})
        await run.until(lambda: run.status is not None and run.status.concurrency == 1)
        assert run.status is not None
        assert run.status.running == 8
        summary = await run.end()
    assert len(summary.scored) == 12
    assert {row["outcome"] for row in rows(tmp_path)} == {"completed"}
    assert len(run.policy.asked) == 12


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"concurrency": 0}, "positive int"),
    ({"concurrency": True}, "positive int"),
    ({"concurrency": 8, "seed": 1}, "`seed` cannot change during a run"),
    ({"budget.cost": -1}, "expected `cost`"),
    ({"budget.coast": 1}, "no `budget.coast`. Did you mean `cost`"),
    ({"budget.sweep": 1}, "no `budget.sweep`"),
    ({"retry.container_error": -1}, "container_error"),
    ({"retry.errors.Nothing": 1}, "classes of errors"),
    ({"retry.often": 1}, "no `retry.often`"),
    ({"policy.max_concurrency": 3}, "cannot change during the run"),
    ({"concurrency.more": 5}, "`concurrency.more` cannot change"),
]


async def test_invalid_settings_are_not_applied(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=2) as run:
        await run.until(lambda: run.policy.asked)
        for values, why in REFUSED:
            noted = await run.order("set", values=values)
            assert noted["outcome"] == "refused", noted
            assert why in noted["says"], noted
        assert run.made._scheduler.concurrency == 1
        await run.order("set", values={"retry.policy_error": 2})
        assert run.made._retry.changed({})._given["policy_error"] == 2
        assert len((await run.end()).scored) == 2


async def test_new_budget_applies_immediately(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=3) as run:
        await run.until(lambda: run.policy.asked)
        await run.order("set", values={"budget.cost": 5, "budget.sweep.tokens": 100})
        await run.until(lambda: run.status is not None and run.status.budget == {"cost": 5, "sweep.tokens": 100})
        await run.order("set", values={"budget.cost": None, "budget.wall_sec": 0.001})
        summary = await run.end()
    assert "budget.wall_sec=0.001" in str(summary.ended_by)


async def test_cancel_affects_only_its_task(tmp_path: Path) -> None:
    async with controlled(tmp_path, count=4, concurrency=2, source=StepsSource(4, no_delay)) as run:
        await run.until(lambda: sorted(run.policy.asked) == ["task-0", "task-1"])
        assert "has the id or task name nobody" in (await run.order("cancel", what="nobody"))["says"]
        assert (await run.order("cancel", what="task-0"))["outcome"] == "done"
        assert "1 attempt removed from the queue" in (await run.order("cancel", what="task-3"))["says"]
        await run.until(lambda: "task-2" in run.policy.asked)
        assert [(row["task_name"], row["outcome"]) for row in rows(tmp_path)] == [("task-0", "cancelled")]
        summary = await run.end()
    assert {one.task_name: one.reward for one in summary.final} == {"task-0": None, "task-1": 1.0, "task-2": 1.0}
    assert (summary.exit_code, summary.interrupted) == (1, False)


class Rooms(LocalExecutor):
    """Has room for task-0 alone until `free` is set."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    @asynccontextmanager
    async def room(self, task_name: str, *, losses: int = 0) -> AsyncIterator[Place]:
        if task_name != "task-0":
            await self.free.wait()
        yield make_here


async def test_queued_tries_are_cancellable_and_respect_pauses(tmp_path: Path) -> None:
    rooms = Rooms()
    async with controlled(tmp_path, count=4, concurrency=3, executor=rooms) as run:
        watch(tmp_path / "run" / "control")
        await run.until(lambda: run.policy.asked and run.status is not None and run.status.running == 1)
        assert run.status is not None
        assert run.status.queued == 3
        noted = await run.order("cancel", what="task-1")
        assert (noted["outcome"], noted["says"].partition(".")[0]) == (
            "done",
            "0 episodes cancelled, and 1 attempt removed from the queue",
        )
        await run.order("pause")
        rooms.free.set()
        run.policy.answering.set()
        await run.until(lambda: run.status is not None and run.status.state == "paused")
        assert run.policy.asked == ["task-0"]
        await run.order("resume")
        summary = await run.end()
    assert sorted(run.policy.asked) == ["task-0", "task-2", "task-3"]
    assert (len(summary.scored), summary.exit_code) == (3, 1)
