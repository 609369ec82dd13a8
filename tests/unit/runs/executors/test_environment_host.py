"""Environments in a host, and `executor=ray` without a cluster."""

import asyncio
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from ares_exp.config.hydra_setup import compose_config
from ares_exp.containers.ownership import find_short_lived
from ares_exp.environment import EpisodeReport, MinimalEnvironment, TimeStep, restart, termination, transition
from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.source import make_scored_source
from ares_exp.environments.twenty_questions import TwentyQuestionsEnvironments
from ares_exp.errors import (
    ConfigError,
    EpisodeStateError,
    HostLostError,
    PolicyError,
    PreflightError,
    SnapshotTimingError,
    StorageError,
    VerifierError,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked, read_asked
from ares_exp.runs.executors import remote_host
from ares_exp.runs.executors.environment_host import EnvironmentHost
from ares_exp.runs.executors.executor import Recipe, RunPlan
from ares_exp.runs.executors.ray_executor import RayExecutor
from ares_exp.runs.executors.remote_host import RemoteEnvironment, _in_short, without_factories
from ares_exp.runs.executors.remote_messages import Failure, News
from ares_exp.testing.environment_contract import EnvironmentContract
from ares_exp.wrappers.registry import make
from tests.unit.containers.local_containers import needs_local
from tests.unit.environments.test_ares_adapter import Wrapped, adapted
from tests.unit.runs.executors.hosted import HostedEnvironment, hosted, parts
from tests.unit.testing.test_bundled_parts import SUBMIT, code_environment
from tests.warm_start import warm_command


class Inside:
    """An environment that always asks the same."""

    async def reset(self) -> TimeStep[Any]:
        return restart(LLMRequest([{"role": "user", "content": "?"}]))

    async def step(self, action: Any) -> TimeStep[Any]:
        return transition(0.0, LLMRequest([{"role": "user", "content": "?"}]))

    async def close(self) -> None: ...


class Slow(Inside):
    """Waits in its first step until it is released or cancelled."""

    def __init__(self) -> None:
        self.stepping = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.closed = asyncio.Event()

    async def step(self, action: Any) -> TimeStep[Any]:
        self.stepping.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        self.closed.set()


RESPONSE = LLMResponse.from_text("Hm.")


class Reporting(Inside):
    """Counts the format errors of its episode: one more in each of the first `changes` steps."""

    def __init__(self, changes: int) -> None:
        self._changes = changes
        self._steps = 0

    async def step(self, action: Any) -> TimeStep[Any]:
        self._steps += 1
        return await super().step(action)

    def report(self) -> EpisodeReport:
        return EpisodeReport(format_errors=min(self._steps, self._changes))


async def test_killed_host_ends_the_call_in_progress() -> None:
    inside = Slow()
    environment = HostedEnvironment(lambda: inside)
    await environment.reset()
    step = asyncio.create_task(environment.step(RESPONSE))
    await inside.stepping.wait()
    environment.host.ray.kill(None)
    with pytest.raises(HostLostError, match="killed"):
        await step
    assert environment.time_step is None
    await environment.close()


async def test_outdated_report_is_ignored() -> None:
    environment = HostedEnvironment(lambda: Reporting(changes=1))
    await environment.reset()
    before = environment.report()
    await environment.step(RESPONSE)
    await environment.host.on_report({environment.name: before})
    assert environment.report().format_errors == 1
    await environment.close()


async def test_cancelled_call_is_cancelled_in_the_host() -> None:
    inside = Slow()
    environment = HostedEnvironment(lambda: inside)
    await environment.reset()
    step = asyncio.create_task(environment.step(RESPONSE))
    await inside.stepping.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert inside.cancelled.is_set()
    await environment.close()
    assert inside.closed.is_set()


async def test_host_without_lease_closes_its_environments() -> None:
    ended = asyncio.Event()
    host = EnvironmentHost(0.2, on_end=ended.set)
    inside = Slow()
    host.adopt("one", inside)
    await host.call(pickle.dumps(("act", ("one", "reset", {}))))
    await asyncio.wait_for(inside.closed.wait(), 60)
    await asyncio.wait_for(ended.wait(), 60)
    failure = pickle.loads(await host.call(pickle.dumps(("news", (0.0,)))))
    assert isinstance(failure, Failure)
    assert failure.name == EpisodeStateError.__name__


class OfTheRunAlone:
    """Can be pickled, but not in a host again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("no module named 'mine'")


async def test_an_unreadable_message_fails_only_its_call() -> None:
    host = hosted(EnvironmentHost(60))
    await host.start()
    with pytest.raises(ImportError, match="no module named 'mine'"):
        await host.call("drop", OfTheRunAlone())
    assert await host.call("drop", "nobody") is None
    await host.close()


async def test_a_silent_host_is_lost() -> None:
    class Silent(EnvironmentHost):
        async def news(self, wait_sec: float) -> tuple[float, list[News]]:
            return await (asyncio.Event().wait() if wait_sec else super().news(0.0))  # type: ignore[return-value]

    host = hosted(Silent(60), lease_sec=0.2)
    await host.start()
    await asyncio.wait_for(asyncio.shield(host.has_ended), 60)
    with pytest.raises(HostLostError, match="did not respond for"):
        await host.call("drop", "one")
    await host.close()


async def test_environment_that_failed_creation_can_be_closed() -> None:
    host = hosted(EnvironmentHost(60))
    environment = RemoteEnvironment(host, "a task", parts())
    with pytest.raises(AssertionError, match="prepare"):
        await environment.reset()
    await environment.close()
    await host.close()


async def test_run_calls_and_records_the_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of a host have no keys: only the run's model answers. An answer that is not recorded is not used."""
    asked = []

    async def fail(files: Path, asked: Asked) -> None:
        raise StorageError("no space")

    async def oracle(request: LLMRequest) -> LLMResponse:
        asked.append(request)
        return LLMResponse.from_text("yes")

    async def nobody(request: LLMRequest) -> LLMResponse:
        raise AssertionError("the host asks by itself")

    def source(client: Callable[..., Any]) -> TwentyQuestionsEnvironments:
        made = TwentyQuestionsEnvironments(limit=1, oracle=client)
        made.load(pytest.fail)
        return made

    of_run, of_host = source(oracle), source(nobody)
    await of_run.preflight()
    environment: HostedEnvironment

    def make() -> Any:
        [model] = of_host.own_models
        model.ask_elsewhere(environment.inside_now)
        return of_host.make("cat", parts(output_dir=tmp_path / "files"))

    environment = HostedEnvironment(make, of_run.own_models, output_dir=tmp_path / "files")
    await environment.reset()
    step = await environment.step(LLMResponse.from_text("Is it alive?"))
    assert "Yes." in str(step.observation)
    assert len(asked) == 1
    [line] = read_asked(tmp_path / "files") or []
    assert (line.question, line.answer) == ("Is it alive?", "yes")
    assert environment.report().environment_usage is not None
    with monkeypatch.context() as patch:
        [of_run_model] = of_run.own_models
        patch.setattr(of_run_model, "append_asked", fail)
        with pytest.raises(StorageError, match="no space"):
            await environment.step(LLMResponse.from_text("Is it big?"))
    await environment.close()


async def test_background_requests_end_with_the_episode() -> None:
    """One that is not answered when the episode ends is not paid for any more."""
    request = LLMRequest([{"role": "user", "content": "a title?"}])
    asked: list[LLMRequest] = []
    cancelled = asyncio.Event()

    async def policy(request: LLMRequest) -> LLMResponse:
        asked.append(request)
        if len(asked) == 2:
            raise PolicyError("no response")
        if len(asked) == 3:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return LLMResponse.from_text("Greetings")

    class Asking:
        unanswered: asyncio.Task[Any]

        async def reset(self) -> TimeStep[Any]:
            self.client = environment.inside_now.background_client_of(environment.name)
            return restart((await self.client(request)).text)

        async def step(self, action: Any) -> TimeStep[Any]:
            with pytest.raises(PolicyError, match="no response"):
                await self.client(request)
            self.unanswered = asyncio.ensure_future(self.client(request))
            while len(asked) < 3:  # noqa: ASYNC110 -- only looked at here
                await asyncio.sleep(0.01)
            self.unanswered.cancel()  # as `AgentHost.cancel` does
            return termination(1.0)

        async def close(self) -> None: ...

    environment = HostedEnvironment(Asking, background_client=policy)
    assert (await environment.reset()).observation == "Greetings"
    assert (await environment.step(RESPONSE)).last()
    await asyncio.wait_for(cancelled.wait(), 60)
    await environment.close()
    assert asked == [request] * 3


async def test_cancelled_step_cancels_its_judge_request() -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def judge(request: LLMRequest) -> LLMResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("unreachable")

    class Judged(Inside):
        async def step(self, action: Any) -> TimeStep[Any]:
            client = environment.inside_now.client("a.judge", EpisodeSpec("a task", 0, 0), None)
            await client(LLMRequest([{"role": "user", "content": "good?"}]))
            raise AssertionError("unreachable")

    model = OwnModel(judge, name="The judge", key="a.judge", error=VerifierError)
    environment = HostedEnvironment(Judged, [model])
    await environment.reset()
    step = asyncio.create_task(environment.step(RESPONSE))
    await asked.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await asyncio.wait_for(cancelled.wait(), 60)
    await environment.close()


async def test_episode_files_are_sent_at_the_end(tmp_path: Path) -> None:
    """More than one piece, in folders, once; `tests/unit/containers/test_archive.py` has more hostile files."""
    (tmp_path / "secret").write_text("from the run's machine")
    kept = tmp_path / "node" / "files"

    class Writing(Inside):
        async def step(self, action: Any) -> TimeStep[Any]:
            (kept / "verifier").mkdir(parents=True)
            (kept / "verifier" / "log.txt").write_text("x" * 200_000)
            (kept / "verifier" / "absolute").symlink_to(tmp_path / "secret")
            return termination(1.0)

    output_dir = tmp_path / "run" / "files" / "e"
    environment = HostedEnvironment(Writing, files=kept, output_dir=output_dir)
    await environment.reset()
    assert (await environment.step(RESPONSE)).last()
    [log] = (output_dir / "verifier").iterdir()
    assert log.read_text() == "x" * 200_000
    log.unlink()
    await environment.close()
    assert not log.exists(), "they are sent once"
    assert not kept.parent.exists()


async def test_folder_of_a_killed_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recipe = Recipe.of(compose_config(["env=twenty_questions", "env.limit=1", "collector=none"]))
    host = EnvironmentHost(60)
    _, sees_run_dir = await host.prepare(recipe, {}, without_factories(parts()), None)
    assert sees_run_dir is False
    assert [one.is_stale for one in find_short_lived()] == [False]
    await host.end()
    assert list(tmp_path.iterdir()) == []


def test_hosts_score_with_the_scorer_of_the_run() -> None:
    overrides = ["scorer=judge", "policy@scorer.policy=scripted", "scorer.policy.replies=[Score: 8]"]
    recipe = Recipe.of(compose_config([*overrides, "collector=none"]))
    source = make_scored_source(OmegaConf.create(dict(recipe.nodes)))
    assert source.spenders == ["the judge `judge`"]


RUN_WORDS = """
import sys
import ares_exp
game = ["env=twenty_questions", "env.limit=1", "policy=oracle"]
results = ares_exp.run([*game, "tracker=none", "hydra.run.dir=run"], quiet=True)
assert results.exit_code == 0
found = [name for name in sys.modules if name.partition(".")[0] == "ray" or name.endswith("ray_executor")]
assert found == [], found
"""


@pytest.mark.once
def test_local_run_does_not_import_ray(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RUN_WORDS)
    command = warm_command(str(tmp_path / "script.py"))
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


async def test_missing_ray_is_a_preflight_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    [check] = RayExecutor().checks(TwentyQuestionsEnvironments(), parts())
    with pytest.raises(PreflightError, match=r"pip install 'ares-exp\[ray\]'"):
        await check


async def test_address_without_a_listener_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=pytest.fail))
    [check] = RayExecutor(address="127.0.0.1:1").checks(TwentyQuestionsEnvironments(), parts())
    with pytest.raises(PreflightError, match=r"none responds \(ConnectionRefusedError"):
        await check


async def test_parts_given_as_objects_are_rejected() -> None:
    executor = RayExecutor()
    ran = RunPlan(source=TwentyQuestionsEnvironments(), task_names=(), parts=parts(), recipe=None)
    with pytest.raises(ConfigError, match="passed as objects"):
        await executor.open(ran, pytest.fail)
    await executor.close()


def test_ray_error_texts_are_shortened() -> None:
    text = "The actor is dead.\n  \x1b[31mWorker exits: End of file. Some common causes include: (1) the OOM killer."
    assert _in_short(RuntimeError(text)) == "RuntimeError: Worker exits: End of file"


LEAVES = """
import asyncio, atexit, sys, threading, types
from contextlib import suppress
from pathlib import Path

def never(*_):
    threading.Event().wait()

atexit.register(never)
sys.modules["ray"] = types.ModuleType("ray")
sys.modules["ray"].shutdown = sys.modules["ray"].nodes = sys.modules["ray"].kill = never
sys.modules["ray"].is_initialized = lambda: False
sys.modules["ray"].init = lambda **options: None
from ares_exp.environments.source import EpisodeParts
from ares_exp.environments.twenty_questions import TwentyQuestionsEnvironments
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import PreflightError
from ares_exp.runs.executors import ray_executor, remote_host
from ares_exp.runs.executors.executor import RunPlan, Recipe
ray_executor.LEAVE_SEC = ray_executor.RESPONSE_SEC = remote_host.KILL_SEC = 0.1

async def main():
    executor = ray_executor.RayExecutor(join_timeout_sec=0.1)
    [check] = executor.checks(None, None)
    await check
    parts = EpisodeParts(None, None, EpisodeLimits(), seed=0)
    recipe = Recipe({}, Path.cwd(), ())
    ran = RunPlan(source=TwentyQuestionsEnvironments(), task_names=(), parts=parts, recipe=recipe)
    with suppress(PreflightError):
        await executor.open(ran, print)
    host = remote_host.RemoteHost(ray=sys.modules["ray"], actor=None, node="a node", models={}, lease_sec=1)
    host.lose("a test")
    await host.close()
    await executor.close()
    print("closed", flush=True)

asyncio.run(main())
"""


def test_process_ends_although_ray_hangs() -> None:
    left = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=100, check=False)
    assert left.returncode == 0, left.stderr
    assert left.stdout == "closed\n"
    assert "did not leave the cluster" in left.stderr


@pytest.fixture(autouse=True)
def _long_wait_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a host that still waits for news after it has ended exceed the time limit of the contract."""
    monkeypatch.setattr(remote_host, "NEWS_SEC", 60.0)


@needs_local
class TestCodeEnvironment(EnvironmentContract):
    replies = ("Hm.", SUBMIT)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = code_environment()
        return HostedEnvironment(lambda: inside)


@needs_local
async def test_host_writes_snapshots_to_the_run(tmp_path: Path) -> None:
    environment = HostedEnvironment(code_environment)
    with pytest.raises(SnapshotTimingError):
        await environment.export_state(tmp_path / "store")
    first = await environment.reset()
    snapshot = await environment.export_state(tmp_path / "store", snapshot_id="mine")
    assert (snapshot.snapshot_id, snapshot.step_count) == ("mine", 0)
    assert (tmp_path / "store" / "mine" / "snapshot.json").is_file()
    assert environment.time_step == first
    assert [one.request for one in environment.pending_requests()] == [first.observation]
    assert not (await environment.step(RESPONSE)).first()
    await environment.close()


class TestTwentyQuestions(EnvironmentContract):
    replies = ("Is it alive?",)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = make("twenty_questions:0:3")
        return HostedEnvironment(lambda: inside)


class TestAres(EnvironmentContract):
    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = adapted(Wrapped())
        return HostedEnvironment(lambda: inside)

    def test_time_limit_can_be_extended(self, environment: MinimalEnvironment) -> None:
        """In a run the time of such an environment is kept around it, in the host."""
