"""Whole episodes of SWE-bench rows, in local boxes that are built from a small repository."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import Shell
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EpisodeParts, Report
from ares_exp.environments.swebench import SweBenchEnvironments
from ares_exp.errors import ConfigError, TaskError, UnsupportedTaskError, VerifierError, VerifierTimeoutError
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.swebench.official import official_version
from ares_exp.tasks.swebench.stage import SweBenchStage
from tests.swebench_rows import SUBMIT, make_repository, make_row, reply, write_rows

pytestmark = pytest.mark.once

FIX = "sed -i 's/a - b/a + b/' calc.py"
Repository = tuple[Path, str]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return make_repository(tmp_path_factory.mktemp("repositories"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Player:
    """Plays rows."""

    def __init__(self, folder: Path, repository: Repository, cache: Path) -> None:
        self.output = folder / "output"
        self._folder, self._repository, self._cache = folder, repository, cache
        self._made: list[CodeEnvironment] = []

    def source(self, *, columns: dict[str, Any] | None = None, **options: Any) -> SweBenchEnvironments:
        row = make_row(*self._repository, **(columns or {}))
        defaults = {
            "build": True,
            "repository": str(self._repository[0]),
            "cache_dir": self._cache,
            "test_command": "python3 -m unittest -v {modules}",
            "log_parser": "unittest",
        }
        return SweBenchEnvironments(
            dataset=str(write_rows(self._folder / "rows.jsonl", row)), **{**defaults, **options}
        )

    def parts(self, *, provide_solution: bool = False) -> EpisodeParts:
        return EpisodeParts(
            LocalContainerFactory(),
            ShellAgentFactory(),
            EpisodeLimits(),
            seed=0,
            provide_solution=provide_solution,
            output_dir=self.output,
        )

    async def environment(self, *, report: Report | None = None, **options: Any) -> CodeEnvironment:
        source, parts = self.source(**options), self.parts()
        [name] = source.load(self._never)
        await source.preflight()
        source.check(parts, report=report or self._never)
        self._made.append(source.make(name, parts))
        return self._made[-1]

    async def play(self, *commands: str, **options: Any) -> dict[str, float]:
        """The rewards for these commands."""
        environment = await self.environment(**options)
        await environment.reset()
        for text in (*map(reply, commands), SUBMIT):
            time_step = await environment.step(LLMResponse.from_text(text, model="test"))
        assert environment.verdict is not None
        assert time_step.reward == environment.verdict.reward
        return dict(environment.verdict.rewards)

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "verifier" / "report.json").read_text())["demo__calc-1"]
        return found

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
async def player(tmp_path: Path, repository: Repository, cache: Path) -> AsyncIterator[Player]:
    made = Player(tmp_path, repository, cache)
    yield made
    await made.close()


@pytest.mark.local
async def test_resolved(player: Player) -> None:
    assert await player.play(FIX) == {"reward": 1.0, "f2p": 1.0, "p2p": 1.0}
    assert player.report["resolved"] is True
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
async def test_what_counts_is_what_the_tests_say(
    player: Player, command: str, rewards: tuple[float, float, float]
) -> None:
    assert await player.play(command) == dict(zip(("reward", "f2p", "p2p"), rewards, strict=True))


@pytest.mark.local
async def test_code_that_does_not_run_resolves_nothing(player: Player) -> None:
    assert await player.play("echo 'def broken(' >> calc.py") == {"reward": 0.0, "f2p": 0.0, "p2p": 0.0}
    assert "SyntaxError" in player.log


@pytest.mark.local
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("rm -rf .git", "The repository that the agent left gives no patch"),
        ("printf 'import os, sys\\nos._exit(0)\\n' > calc.py", "no result of a test (exit code 0)"),
        ("printf 'import os\\nprint(\"test_add ... ok\", flush=True)\\nos._exit(3)\\n' > calc.py", "exit code 3"),
    ],
)
async def test_what_cannot_be_graded_is_unresolved_and_says_why(player: Player, command: str, told: str) -> None:
    assert (await player.play(command))["reward"] == 0.0
    assert told in player.report["reason"]
    assert player.note == player.report["reason"]


@pytest.mark.local
@pytest.mark.parametrize(
    ("test_command", "told"),
    [
        ("python3 -S -m pytest {files}", None),  # not looked into: its Python has options
        ("ares-exp-nothing -v {modules}", "exit code 127: ares-exp-nothing: command not found."),
        ("ares-exp-python -m pytest {files}", "exit code 127: ares-exp-python: command not found."),
        ("bare -m pytest {files}", "No module named 'pytest'"),
    ],
)
async def test_tests_that_cannot_start_in_the_image_are_an_error_before_the_agent_starts(
    player: Player, test_command: str, told: str | None
) -> None:
    bare = "printf '#!/bin/sh\nexec /usr/bin/env python3 -S \"$@\"\n' > /usr/bin/bare && chmod +x /usr/bin/bare"
    environment = await player.environment(test_command=test_command, log_parser="pytest", install=[bare], report=print)
    if told is None:
        await environment.reset()
        return
    with pytest.raises(VerifierError, match="demo__calc-1: its tests cannot start in its image") as caught:
        await environment.reset()
    assert told in str(caught.value)
    assert "env.pip_packages=[pytest]" in str(caught.value)
    assert not player.output.exists()


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, True),
        ({"pip_packages": ["requests"], "setup": ["apt-get install -y git"]}, True),
        ({"pip_packages": ["pytest>=8"]}, False),
        ({"pip_packages": ["-r", "dev.txt"]}, False),
        ({"install": ["pip install -e .[test]"]}, False),
        ({"test_command": "python -m unittest {modules}"}, False),
    ],
)
async def test_a_build_without_pytest_is_told_before_the_start(
    player: Player, options: dict[str, Any], warns: bool
) -> None:
    said = list[str]()
    await player.environment(report=said.append, **{"test_command": None, "log_parser": None, **options})
    assert any("unless python:3.12-slim has it they cannot start" in text for text in said) is warns


@pytest.mark.local
async def test_an_episode_is_not_graded_by_the_patch_of_the_one_before(player: Player) -> None:
    environment = await player.environment()
    rewards = []
    for command in ("rm -rf .git", FIX, "rm -rf .git"):
        await environment.reset()
        await environment.step(LLMResponse.from_text(reply(command), model="test"))
        rewards.append((await environment.step(LLMResponse.from_text(SUBMIT, model="test"))).reward)
    assert rewards == [0.0, 1.0, 0.0]


@pytest.mark.local
async def test_tests_that_do_not_end_are_an_error_and_their_log_is_kept(player: Player) -> None:
    slow = "printf 'import time\\nprint(\"waiting\", flush=True)\\ntime.sleep(1000)\\n' > calc.py"
    with pytest.raises(VerifierTimeoutError, match=r"env\.test_timeout_sec=1 s"):
        await player.play(slow, test_timeout_sec=1)
    assert "waiting" in player.log
    assert player.report["resolved"] is False


EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
git apply -v - <<'EOF_114329324912'
{patch}
EOF_114329324912
: '>>>>> Start Test Output'
python3 -m unittest -v tests.test_calc
: '>>>>> End Test Output'
git checkout {base} tests/test_calc.py
"""


@pytest.mark.local
@pytest.mark.skipif(not official_version(), reason="swebench is missing")
@pytest.mark.parametrize(("command", "reward"), [(FIX, 1.0), ("true", 0.0)])
async def test_the_script_of_the_row_is_graded_by_the_official_harness(
    player: Player, repository: Repository, command: str, reward: float
) -> None:
    row = make_row(*repository)
    columns = {
        "eval_script": EVAL_SCRIPT.format(patch=row["test_patch"], base=repository[1]),
        "log_parser": "parse_log_django",
    }
    found = await player.play(command, columns=columns, test_command=None, log_parser=None)
    assert player.report["grader"].startswith("swebench 5")
    assert found == {"reward": reward, "f2p": reward, "p2p": 1.0}


@pytest.mark.local
async def test_a_row_whose_test_patch_does_not_fit_is_an_error(player: Player, repository: Repository) -> None:
    patch = make_row(*repository)["test_patch"].replace("test_double", "test_other")
    with pytest.raises(VerifierError, match="does not fit its base commit"):
        await player.play(FIX, columns={"test_patch": patch})


@pytest.mark.local
async def test_an_episode_goes_on_from_a_snapshot(player: Player, tmp_path: Path) -> None:
    environment = await player.environment()
    await environment.reset()
    await environment.step(LLMResponse.from_text(reply(FIX), model="test"))
    snapshot = await environment.export_state(tmp_path / "store")
    await environment.close()
    task = environment.current_task or player.source().tasks[0]
    async with await CodeEnvironment.load_from_state(snapshot, task=task) as restored:
        time_step = await restored.step(LLMResponse.from_text(SUBMIT, model="test"))
    assert time_step.reward == 1.0


def test_the_instruction_has_hints_if_wanted(player: Player) -> None:
    for hints, told in ((False, False), (True, True)):
        source = player.source(hints=hints)
        source.load(print)
        instruction = source.tasks[0].stages[0].instruction
        assert "add(2, 3) is -1." in instruction
        assert "/testbed" in instruction
        assert ("It subtracts." in instruction) is told


def test_the_digest_tells_how_it_is_played_and_graded(player: Player) -> None:
    def digest(**options: Any) -> str:
        source = player.source(**options)
        source.load(print)
        return source.digest("demo__calc-1")

    assert digest() == digest(test_timeout_sec=5, limit=1)
    different = [{"hints": True}, {"test_command": "x"}, {"build": False}, {"setup": ["x"]}, {"columns": {"patch": ""}}]
    assert len({digest(), *(digest(**one) for one in different)}) == 1 + len(different)


@pytest.mark.local
@pytest.mark.parametrize("shell", ["bash -c", "bash -lc"])
async def test_only_agents_in_published_images_have_a_login_shell(
    player: Player, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published image activates the environment of its repository in root's profile files."""
    for build, expected in ((False, "bash -lc"), (True, None)):
        source = player.source(build=build)
        source.load(print)
        assert source.tasks[0].stages[0].agent_shell == expected
    monkeypatch.setattr(SweBenchStage, "agent_shell", shell)
    environment = await player.environment()
    await environment.reset()
    await environment.step(LLMResponse.from_text(reply("echo 'export FOUND=profile' > ~/.profile"), model="test"))
    seen = await environment.step(LLMResponse.from_text(reply('echo "<$FOUND>"'), model="test"))
    assert seen.observation is not None
    told = str(seen.observation.messages[-1]["content"])
    assert ("<profile>" if shell == "bash -lc" else "<>") in told


def test_agents_without_a_network_are_asked_for_by_phase(player: Player) -> None:
    source = player.source(agent_network="no-network", build=False)
    source.load(print)
    [task] = source.tasks
    assert {policy.mode for policy in task.container_spec.networks} == {"public", "no-network"}
    assert task.stages[0].agent_network.mode == "no-network"
    assert {policy.mode for policy in task.stages[0].verifier_spec.networks} == {"public"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"columns": {"image_assets": {"patch": [{"path": "a.png"}]}}}, "multimodal"),
        ({"columns": {"eval_script": "x", "log_parser": "parse_log_gotest"}, "test_command": None, "log_parser": None},
         "is graded by the official harness alone"),
        ({"log_parser": "parse_log_django"}, "is graded by the official harness alone"),
        ({"columns": {"test_patch": ""}}, "expected its test patch to have files"),
        ({"columns": {"patch": ""}}, "expected a fix"),
        ({"build": False}, "container=local runs no images (swebench/sweb.eval.x86_64.demo_1776_calc-1:latest)"),
        ({"base_image": "x", "install": ["y"], "build": True}, "Dockerfile"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_played_are_refused_by_name(player: Player, options: dict[str, Any], told: str) -> None:
    source = player.source(grader="own", **options)
    source.load(print)
    with pytest.raises((UnsupportedTaskError, TaskError)) as caught:
        source.check(player.parts(provide_solution=True), report=print)
    assert told in str(caught.value)
    assert "env.exclude=[demo__calc-1]" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "log_parser", "told"),
    [(None, None, "pip install 'ares-exp[swebench]'"), ("5.0.2", "unittest", "does not read the format unittest")],
)
def test_a_published_row_whose_grader_is_missing_is_refused_before_the_start(
    player: Player, monkeypatch: pytest.MonkeyPatch, version: str | None, log_parser: str | None, told: str
) -> None:
    monkeypatch.setattr("ares_exp.tasks.swebench.swebench_task.official_version", lambda: version)
    columns = {"eval_script": EVAL_SCRIPT, "log_parser": "parse_log_django"}
    source = player.source(columns=columns, test_command=None, log_parser=log_parser)
    source.load(print)
    with pytest.raises(UnsupportedTaskError) as caught:
        source.check(player.parts(), report=print)
    assert told in str(caught.value)


def test_options_are_checked_before_anything_is_read() -> None:
    for options in ({"image_template": "x"}, {"log_parser": "x"}, {"test_command": ""}, {"base_image": "a b"}):
        with pytest.raises(ConfigError, match=rf"env\.{next(iter(options))}"):
            SweBenchEnvironments(dataset="no.jsonl", **options)  # type: ignore[arg-type]


def test_a_run_is_told_when_commands_are_guessed(player: Player) -> None:
    source = player.source(build=False, test_command=None)
    source.load(print)
    told: list[str] = []
    source.check(EpisodeParts(AnyBox(), ShellAgentFactory(), EpisodeLimits(), seed=0), report=told.append)  # type: ignore[arg-type]
    assert len(told) == 1
    assert "1 of 1 rows have no eval_script" in told[0]


class AnyBox:
    """A backend that refuses nothing."""

    max_containers = None

    def check(self, spec: object) -> list[str]:
        return []
