"""The conformance suites on the parts of this package, and on some that were written without it.

Containers: `tests/unit/containers/test_local_contract.py`, `tests/docker`, `tests/daytona`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.agents.terminal_agent import TerminalAgentFactory
from ares_exp.agents.tools_agent import ToolsAgentFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environment import MinimalEnvironment, TimeStep, restart, termination, transition
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.environments.source import EnvironmentSource
from ares_exp.environments.swebench import SweBenchEnvironments
from ares_exp.environments.twenty_questions import TwentyQuestionsEnvironments
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, ToolCallData
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.policies.policy import Policy, Weights
from ares_exp.policies.replay import ReplayPolicy
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.snapshots.schedule import SnapshotSchedule
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.testing.agent_contract import AgentContract
from ares_exp.testing.collector_contract import CollectorContract
from ares_exp.testing.environment_contract import EnvironmentContract
from ares_exp.testing.policy_contract import PolicyContract
from ares_exp.testing.source_contract import SourceContract
from ares_exp.testing.tracker_contract import TrackerContract
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from ares_exp.trackers.tensorboard_tracker import TensorboardTracker
from ares_exp.trackers.tracker import NullTracker, RunInfo, Tracker
from ares_exp.trackers.wandb_tracker import WandbTracker
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors import (
    JsonlTrajectoryCollector,
    JsonTrajectoryCollector,
    MemoryTrajectoryCollector,
    NullTrajectoryCollector,
)
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, deserialize_llm_request
from ares_exp.wrappers.registry import make
from ares_exp.wrappers.tracked_environment import TrackedEnvironment
from tests import swebench_rows
from tests.agents.thorough_agent import ThoroughAgentFactory, respond
from tests.loopback_endpoint import LoopbackEndpoint
from tests.loopback_endpoint import respond as completion
from tests.unit.containers.local_containers import needs_local
from tests.unit.environments.test_ares_adapter import Wrapped, adapted
from tests.unit.trajectories.chats import chat, write


@needs_local
class TestHarbor(SourceContract):
    @pytest.fixture
    def source(self) -> EnvironmentSource:
        return HarborEnvironments(tasks=["write-greeting", "count-records"])


@needs_local
@pytest.mark.once
class TestSweBench(SourceContract):
    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSource:
        repository = swebench_rows.make_repository(tmp_path / "repositories")
        swebench_rows.put_harness_on_path(tmp_path / "harness", monkeypatch)
        swebench_rows.use_local_image(swebench_rows.build_context(tmp_path, *repository), monkeypatch)
        return SweBenchEnvironments(
            dataset=str(swebench_rows.write_rows(tmp_path / "rows.jsonl", swebench_rows.make_row(*repository)))
        )


class TestTwentyQuestions(SourceContract):
    @pytest.fixture
    def source(self) -> EnvironmentSource:
        return TwentyQuestionsEnvironments(limit=2)


class TestPluginSource(SourceContract):
    """One that has what a source needs at least, written without this package's classes."""

    @pytest.fixture
    def source(self, nim: None) -> EnvironmentSource:
        from ares_nim.environment import NimEnvironments

        return NimEnvironments(matches=[3, 5])


SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"


def code_environment() -> CodeEnvironment:
    return CodeEnvironment(
        [load_task(SAMPLES / name) for name in ("write-greeting", "count-records")],
        container_factory=LocalContainerFactory(),
        code_agent_factory=ShellAgentFactory(),
        limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=100.0)),
    )


class Bare:
    """What an environment needs at least."""

    left = 0

    async def reset(self) -> TimeStep[Any]:
        self.left = 3
        return restart(LLMRequest([{"role": "user", "content": "?"}]))

    async def step(self, action: Any) -> TimeStep[Any]:
        if self.left == 0:
            raise EpisodeStateError("Call reset() first.")
        self.left -= 1
        return transition(LLMRequest([{"role": "user", "content": "?"}])) if self.left else termination(1.0)

    async def close(self) -> None: ...


class TestBareEnvironment(EnvironmentContract):
    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        return Bare()


@needs_local
class TestCodeEnvironment(EnvironmentContract):
    replies = ("Hm.", SUBMIT)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        return code_environment()


@needs_local
@pytest.mark.once
class TestWrappers(EnvironmentContract):
    """Around the same environment, all that the package puts around one."""

    replies = ("Hm.", SUBMIT)

    @pytest.fixture
    def environment(self, tmp_path: Path) -> MinimalEnvironment:
        schedule = SnapshotSchedule(tmp_path / "snapshots", every=1)
        inside = TrajectoryCollectingEnvironment(
            schedule.around(code_environment(), episode_id="e"), NullTrajectoryCollector()
        )
        return TrackedEnvironment(inside, NullTracker())


class TestTwentyQuestionsEnvironment(EnvironmentContract):
    replies = ("Is it alive?",)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        return make("twenty_questions:0:3")


class TestAresEnvironment(EnvironmentContract):
    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        return adapted(Wrapped())


class TestPluginEnvironment(EnvironmentContract):
    replies = ("1",)

    @pytest.fixture
    def environment(self, nim: None) -> MinimalEnvironment:
        from ares_nim.environment import Nim

        return Nim(6)


RECORDED = chat(length=4)


class TestReplay(PolicyContract):
    task_name = RECORDED.task_name

    @pytest.fixture
    def policy(self, tmp_path: Path) -> LLMClient:
        write(tmp_path / "trajectories" / "e.json", RECORDED)
        return ReplayPolicy(trajectory=tmp_path / "trajectories", strict=False)

    @pytest.fixture
    def question(self) -> LLMRequest:
        assert RECORDED.steps[0].observation is not None
        return deserialize_llm_request(RECORDED.steps[0].observation)


class TestChatCompletions(PolicyContract):
    @pytest.fixture
    def policy(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMClient]:
        monkeypatch.setenv("CONTRACT_API_KEY", "sk-0")
        with LoopbackEndpoint(otherwise=completion("fine")) as endpoint:
            yield OpenAIPolicy(model="m", base_url=endpoint.url, api_key_env="CONTRACT_API_KEY")


async def fine(request: LLMRequest) -> LLMResponse:
    """A function, which is all that a policy needs to be."""
    return LLMResponse.from_text("fine")


class Versioned(Policy):
    """A policy without a model, whose weights are a name."""

    policy_version: str | None = None

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("fine", policy_version=self.policy_version)

    async def update(self, version: str, weights: Weights | None = None) -> None:
        self.policy_version = version


class TestPolicies(PolicyContract):
    @pytest.fixture(
        params=[OraclePolicy, lambda: ScriptedPolicy(replies={"contract": ["one", "two"]}), lambda: fine, Versioned],
        ids=["oracle", "scripted", "function", "updatable"],
    )
    def policy(self, request: pytest.FixtureRequest) -> LLMClient:
        return request.param()


@pytest.fixture(
    params=[
        lambda path: JsonTrajectoryCollector(path),
        lambda path: JsonTrajectoryCollector(path, compression="zstd"),
        lambda path: JsonlTrajectoryCollector(path / "all.jsonl"),
        lambda path: MemoryTrajectoryCollector(),
    ],
    ids=["json", "zstd", "jsonl", "memory"],
)
def bundled_collector(request: pytest.FixtureRequest, tmp_path: Path) -> TrajectoryCollector:
    return request.param(tmp_path / "trajectories")


class TestCollectors(CollectorContract):
    @pytest.fixture
    def collector(self, bundled_collector: TrajectoryCollector) -> TrajectoryCollector:
        return bundled_collector


class TestNullCollector(CollectorContract):
    keeps_steps = False

    @pytest.fixture
    def collector(self) -> TrajectoryCollector:
        return NullTrajectoryCollector()


class OneAtATime:
    """What a collector needs at least, and no handles."""

    def __init__(self) -> None:
        self._inside: MemoryTrajectoryCollector = MemoryTrajectoryCollector()

    def begin_episode(self, *, task_name: str) -> object:
        return self._inside.begin_episode(task_name=task_name)

    def record_step(self, record: StepRecord) -> None:
        self._inside.record_step(record)

    def end_episode(self, *, truncated: bool = False) -> EpisodeTrajectory:
        return self._inside.end_episode(truncated=truncated)


class TestForeignCollector(CollectorContract):
    @pytest.fixture
    def collector(self) -> TrajectoryCollector:
        return OneAtATime()


def wandb_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    monkeypatch.setenv("HOME", str(tmp_path))
    return WandbTracker(mode="offline", finish_timeout_sec=100.0)


class Least:
    """A tracker that takes neither system metrics nor trajectories."""

    def start(self, run: RunInfo) -> None: ...
    def log_episode(self, result: Any) -> None: ...
    def finish(self, summary: Any) -> None: ...


class TestTrackers(TrackerContract):
    @pytest.fixture(
        params=[
            lambda *_: NullTracker(),
            lambda *_: JsonlTracker(),
            lambda *_: pytest.importorskip("tensorboardX") and TensorboardTracker(),
            pytest.param(wandb_tracker, marks=[pytest.mark.once, pytest.mark.slow]),  # slow as the other tests of W&B
            lambda *_: Least(),
        ],
        ids=["null", "jsonl", "tensorboard", "wandb", "foreign"],
    )
    def tracker(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
        return request.param(tmp_path, monkeypatch)


class TestShellAgent(AgentContract):
    @pytest.fixture
    def factory(self) -> Any:
        return ShellAgentFactory(command_timeout_sec=3.0)


class TestToolsAgent(AgentContract):
    replies = (
        LLMResponse([ToolCallData("a", "bash", '{"command": "ls"}'), ToolCallData("b", "edit", "{}")]),
        "Hm.",
        LLMResponse([ToolCallData("c", "submit", "{}")]),
    )

    @pytest.fixture
    def factory(self) -> Any:
        return ToolsAgentFactory(tools=["submit", "bash", "edit"], compaction="summarise")


class TestTerminalAgent(AgentContract):
    replies = (
        '{"analysis": "", "plan": "", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}]}',
        "Hm.",
        *['{"analysis": "", "plan": "", "commands": [], "task_complete": true}'] * 2,
    )

    @pytest.fixture
    def factory(self) -> Any:
        pytest.importorskip("pyte")
        return TerminalAgentFactory()


class TestThoroughAgent(AgentContract):
    replies = ("fine", "true", "fine", "true", "fine", "done")

    @pytest.fixture
    def factory(self) -> Any:
        return ThoroughAgentFactory()

    @pytest.fixture
    def container(self) -> Any:
        from ares_exp.testing.echo_container import RehearsalContainer

        return RehearsalContainer(respond)
