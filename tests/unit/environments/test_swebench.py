"""Whole episodes of SWE-bench rows, in local boxes that are built from a small repository."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EpisodeParts
from ares_exp.environments.swebench import SweBenchEnvironments
from ares_exp.errors import TaskError, UnsupportedTaskError, VerifierTimeoutError
from ares_exp.llms.response import LLMResponse
from tests import swebench_rows

pytestmark = pytest.mark.once

FIX = "sed -i 's/a - b/a + b/' calc.py"
Repository = tuple[Path, str]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return swebench_rows.make_repository(tmp_path_factory.mktemp("repositories"))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, repository: Repository) -> Path:
    return swebench_rows.build_context(tmp_path_factory.mktemp("context"), *repository)


class Player:
    def __init__(self, folder: Path, repository: Repository) -> None:
        self.output = folder / "output"
        self._folder, self._repository = folder, repository
        self._made: list[CodeEnvironment] = []

    def source(self, *, columns: dict[str, Any] | None = None, **options: Any) -> SweBenchEnvironments:
        row = swebench_rows.make_row(*self._repository, **(columns or {}))
        return SweBenchEnvironments(dataset=str(swebench_rows.write_rows(self._folder / "rows.jsonl", row)), **options)

    def parts(self, *, provide_solution: bool = False) -> EpisodeParts:
        return EpisodeParts(
            LocalContainerFactory(),
            ShellAgentFactory(),
            EpisodeLimits(),
            seed=0,
            provide_solution=provide_solution,
            output_dir=self.output,
        )

    async def environment(self, **options: Any) -> CodeEnvironment:
        source, parts = self.source(**options), self.parts()
        [name] = source.load(self._never)
        source.check(parts, report=self._never)
        self._made.append(source.make(name, parts))
        return self._made[-1]

    async def execute(self, *commands: str, **options: Any) -> dict[str, float]:
        """The rewards for these commands."""
        environment = await self.environment(**options)
        await environment.reset()
        for text in (*map(swebench_rows.reply, commands), swebench_rows.SUBMIT):
            time_step = await environment.step(LLMResponse.from_text(text, model="test"))
        assert time_step.reward == environment.verdict.reward
        return dict(environment.verdict.rewards)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.output / "verifier" / "report.json").read_text())["demo__calc-1"]

    @property
    def note(self) -> str | None:
        return self._made[-1].report().note

    @property
    def log(self) -> str:
        return (self.output / "verifier" / "test_output.txt").read_text()

    def _never(self, warning: str) -> None:
        raise AssertionError(warning)

    async def close(self) -> None:
        for environment in self._made:
            await environment.close()


@pytest.fixture
async def player(
    tmp_path: Path, repository: Repository, context: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Player]:
    swebench_rows.put_harness_on_path(tmp_path / "harness", monkeypatch)
    swebench_rows.use_local_image(context, monkeypatch)
    made = Player(tmp_path, repository)
    yield made
    await made.close()


@pytest.mark.local
async def test_correct_patch_is_resolved(player: Player) -> None:
    assert await player.execute(FIX) == {"reward": 1.0, "f2p": 1.0, "p2p": 1.0}
    assert player.report["resolved"] is True
    assert player.report["grader"].startswith("swebench 5")
    assert "test_add (tests.test_calc.Tests.test_add) ... ok" in player.log
    assert "a + b" in (player.output / "artifacts" / "model.patch").read_text()
    assert json.loads((player.output / "verifier" / "reward.json").read_text())["reward"] == 1.0


@pytest.mark.local
@pytest.mark.parametrize(
    ("command", "rewards"),
    [
        ("true", (0.0, 0.0, 1.0)),
        (f"{FIX} && sed -i 's/2 \\* a/3 * a/' calc.py", (0.0, 1.0, 0.0)),
        (f"{FIX} && git -c user.name=a -c user.email=b commit -qam mine && git checkout -q --detach", (1.0, 1.0, 1.0)),
        # What follows tries to be rewarded without a fix.
        ("sed -i 's/5)/-1)/' tests/test_calc.py; echo > tests/test_new.py", (0.0, 0.0, 1.0)),
        ("rm -r tests && mkdir -p tests/test_calc.py", (0.0, 0.0, 1.0)),
        (
            "printf '#!/bin/sh\\necho PASSED\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3",
            (0.0, 0.0, 1.0),
        ),
        ("(while :; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &", (0.0, 0.0, 1.0)),
    ],
)
async def test_reward_follows_the_test_results(
    player: Player, command: str, rewards: tuple[float, float, float]
) -> None:
    assert await player.execute(command) == dict(zip(("reward", "f2p", "p2p"), rewards, strict=True))


@pytest.mark.local
async def test_broken_code_resolves_no_tests(player: Player) -> None:
    assert await player.execute("echo 'def broken(' >> calc.py") == {"reward": 0.0, "f2p": 0.0, "p2p": 0.0}
    assert "SyntaxError" in player.log


@pytest.mark.local
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("rm -rf .git", "The patch cannot be read from the agent's repository"),
        ("printf 'import os, sys\\nos._exit(0)\\n' > calc.py", "no valid test run"),
        (
            "printf 'import os\\nprint(\"test_add (a) ... ok\", flush=True)\\nos._exit(3)\\n' > calc.py",
            "no valid test run",
        ),
    ],
)
async def test_ungradable_patch_is_unresolved_with_a_reason(player: Player, command: str, told: str) -> None:
    assert (await player.execute(command))["reward"] == 0.0
    assert told in player.report["reason"]
    assert player.note == player.report["reason"]


@pytest.mark.local
async def test_episodes_are_graded_independently(player: Player) -> None:
    environment = await player.environment()
    rewards = []
    for command in ("rm -rf .git", FIX, "rm -rf .git"):
        await environment.reset()
        await environment.step(LLMResponse.from_text(swebench_rows.reply(command), model="test"))
        rewards.append((await environment.step(LLMResponse.from_text(swebench_rows.SUBMIT, model="test"))).reward)
    assert rewards == [0.0, 1.0, 0.0]


@pytest.mark.local
async def test_endless_tests_are_an_error_with_log(player: Player) -> None:
    slow = "printf 'import time\\nprint(\"waiting\", flush=True)\\ntime.sleep(1000)\\n' > calc.py"
    with pytest.raises(VerifierTimeoutError, match=r"env\.test_timeout_sec=1 s"):
        await player.execute(slow, test_timeout_sec=1)
    assert "waiting" in player.log
    assert player.report["resolved"] is False


@pytest.mark.local
async def test_episode_continues_from_a_snapshot(player: Player, tmp_path: Path) -> None:
    environment = await player.environment()
    await environment.reset()
    await environment.step(LLMResponse.from_text(swebench_rows.reply(FIX), model="test"))
    snapshot = await environment.export_state(tmp_path / "store")
    await environment.close()
    task = environment.current_task or player.source().tasks[0]
    async with await CodeEnvironment.load_from_state(snapshot, task=task) as restored:
        time_step = await restored.step(LLMResponse.from_text(swebench_rows.SUBMIT, model="test"))
    assert time_step.reward == 1.0


def test_instruction_contains_hints_on_request(player: Player) -> None:
    for hints, told in ((False, False), (True, True)):
        source = player.source(hints=hints)
        source.load(print)
        instruction = source.tasks[0].stages[0].instruction
        assert "add(2, 3) is -1." in instruction
        assert "/testbed" in instruction
        assert ("It subtracts." in instruction) is told


def test_digest_depends_on_the_options(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**options: Any) -> str:
        source = player.source(**options)
        source.load(print)
        return source.digest("demo__calc-1")

    assert digest() == digest(test_timeout_sec=5, limit=1)
    monkeypatch.undo()
    different = [{}, {"hints": True}, {"columns": {"image": "mine"}}, {"columns": {"patch": ""}}]
    assert len({digest(**one) for one in different}) == len(different)


@pytest.mark.local
async def test_agents_have_a_login_shell(player: Player) -> None:
    """A published image activates the environment of its repository in root's profile files."""
    environment = await player.environment()
    await environment.reset()
    await environment.step(
        LLMResponse.from_text(swebench_rows.reply("echo 'export FOUND=profile' > ~/.profile"), model="test")
    )
    seen = await environment.step(LLMResponse.from_text(swebench_rows.reply('echo "<$FOUND>"'), model="test"))
    assert "<profile>" in str(seen.observation.messages[-1]["content"])


def test_agent_network_is_set_by_phase(player: Player) -> None:
    source = player.source(agent_network="no-network")
    source.load(print)
    [task] = source.tasks
    assert {policy.mode for policy in task.container_spec.networks} == {"public", "no-network"}
    assert task.stages[0].agent_network.mode == "no-network"
    assert {policy.mode for policy in task.stages[0].verifier_spec.networks} == {"public"}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"image_assets": {"patch": [{"path": "a.png"}]}}, "multimodal"),
        ({"eval_script": ""}, "the row has no `eval_script`"),
        ({"patch": ""}, "`patch` is empty"),
    ],
)
def test_invalid_rows_are_refused_by_name(player: Player, columns: dict[str, Any], told: str) -> None:
    refused(player, told, columns=columns)


def refused(player: Player, told: str, **options: Any) -> None:
    source = player.source(**options)
    source.load(print)
    with pytest.raises((UnsupportedTaskError, TaskError)) as caught:
        source.check(player.parts(provide_solution=True), report=print)
    assert told in str(caught.value)
    assert "demo__calc-1" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ({}, "swebench/sweb.eval.x86_64.demo_1776_calc-1:latest"),
        ({"columns": {"image": "mine/a:1"}}, "mine/a:1"),
    ],
)
def test_published_images_are_refused_by_local_containers(
    player: Player, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], image: str
) -> None:
    monkeypatch.undo()
    swebench_rows.put_harness_on_path(tmp_path / "harness", monkeypatch)
    refused(player, f"container=local does not support images ({image})", **options)


def test_missing_grader_is_refused_before_the_start(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.tasks.swebench.swebench_task.official_version", lambda: None)
    refused(player, "pip install 'ares-exp[swebench]'")
