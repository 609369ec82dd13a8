"""What a step of a multi-step task does in a real container: its set-up, its tests, its solution."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ares_exp.containers.container import Container
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import HealthcheckError, StepSetupError, TaskError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.task_contract import Verdict
from tests.unit.containers.local_containers import USER

pytestmark = pytest.mark.local

MakeTask = Callable[..., Path]
STEPS = "[[steps]]\nname = 'one'\n{one}\n[[steps]]\nname = 'two'\n"
INSTRUCTIONS = {"steps/one/instruction.md": "One.", "steps/two/instruction.md": "Two.", "instruction.md": None}


@asynccontextmanager
async def set_up(task: HarborTask) -> AsyncIterator[Container]:
    async with LocalContainerFactory()(task.container_spec) as box:
        await task.set_up(box)
        yield box


def load(make_task: MakeTask, *, one: str = "", **files: str) -> HarborTask:
    return load_task(make_task(toml=STEPS.format(one=one), files={**INSTRUCTIONS, **files}))


async def test_files_and_script_of_a_step(make_task: MakeTask) -> None:
    script = 'echo "$(pwd) $(id -u) $(cat data/x)" > /tmp/said'
    files = {"steps/one/workdir/setup.sh": script, "steps/one/workdir/data/x": "here"}
    task = load(make_task, one=f"agent.user = {USER}", **files)
    async with set_up(task) as box:
        await task.stages[1].start(box)
        assert (await box.exec("ls -A /app")).output == ""
        await task.stages[0].start(box)
        assert (await box.exec("cat /tmp/said; ls -A /app")).output == f"/app {USER} here\ndata\nsetup.sh\n"


async def test_a_script_that_fails(make_task: MakeTask) -> None:
    task = load(make_task, one="healthcheck.command = 'touch /checked'",
                **{"steps/one/workdir/setup.sh": "echo no luck >&2; exit 9"})  # fmt: skip
    async with set_up(task) as box:
        with pytest.raises(StepSetupError, match=r"(?s)setup\.sh of step 'one' gave exit code 9; .*\nno luck"):
            await task.stages[0].start(box)
        assert (await box.exec("ls /checked")).exit_code != 0


async def test_the_health_check_of_a_step_is_run_after_its_script_as_its_agent(make_task: MakeTask) -> None:
    healthcheck = f"agent.user = {USER}\nhealthcheck.command = '[ -e /tmp/made -a $(id -u) -eq {USER} ]'\n"
    task = load(make_task, one=f"{healthcheck}healthcheck.retries = 1",
                **{"steps/one/workdir/setup.sh": "touch /tmp/made"})  # fmt: skip
    async with set_up(task) as box:
        await task.stages[0].start(box)
        await box.exec("rm /tmp/made; rm /app/setup.sh")
    (task.path / "steps" / "one" / "workdir" / "setup.sh").unlink()
    async with set_up(task) as box:
        with pytest.raises(HealthcheckError, match="failed 1 times"):
            await task.stages[0].start(box)


async def test_logs_and_tests_of_the_step_before_are_gone(make_task: MakeTask) -> None:
    task = load(make_task)
    async with set_up(task) as box:
        await task.stages[0].start(box)
        await task.stages[0].verify(box, None)
        await box.exec("touch /logs/agent/x /logs/artifacts/x")
        await task.stages[1].start(box)
        listing = await box.exec("find /logs /tests -mindepth 1 | sort; stat -c %a /logs/agent /logs/verifier")
    assert listing.output.splitlines() == [
        *("/logs/agent", "/logs/artifacts", "/logs/artifacts/x", "/logs/verifier", "777", "777"),
    ]


async def test_tests_of_a_step_go_over_the_shared_ones(make_task: MakeTask) -> None:
    own = "#!/bin/bash\ncat /tests/both /tests/shared | paste -sd+ | tr + . > /logs/verifier/reward.txt\n"
    task = load(
        make_task,
        **{"steps/one/tests/test.sh": own, "steps/one/tests/both": "1\n", "tests/both": "2\n", "tests/shared": "5\n"},
    )
    async with set_up(task) as box:
        await box.exec("mkdir /tests; touch /tests/from-the-image")
        assert not await task.stages[0].clear(box)
        assert (await task.stages[0].verify(box, None)).reward == 1.5
        assert (await box.exec("ls /tests")).output.split() == ["both", "shared", "test.sh"]
        await task.stages[1].clear(box)
        assert (await task.stages[1].verify(box, None)).reward == 1.0


async def test_the_solution_of_a_step_or_else_the_tasks(make_task: MakeTask) -> None:
    task = load(make_task, **{"steps/one/solution/solve.sh": "#!/bin/bash\necho one > /app/said\n"})
    async with set_up(task) as box:
        said = []
        for stage in task.stages:
            await stage.upload_solution(box)
            await box.exec("/solution/solve.sh")
            said.append((await box.exec("ls /app; cat /app/said")).output.split())
    assert said == [["said", "one"], ["done", "said", "one"]]


def test_a_solution_directory_without_its_script_is_no_solution(make_task: MakeTask) -> None:
    task = load(make_task, **{"steps/one/solution/notes": "", "steps/two/solution/solve.sh": ""})
    with pytest.raises(TaskError, match=r"steps/one/solution/solve\.sh: expected the task's solution"):
        task.check_runnable(needs_solution=True)


@pytest.mark.parametrize(
    ("least", "rewards", "goes_on"),
    [
        ("", {"reward": 0.0}, True),
        ("min_reward = 0.5", {"reward": 0.5}, True),
        ("min_reward = 0.5", {"reward": 0.4}, False),
        ("min_reward = 0.5", {"other": 1.0}, False),
        ("min_reward = {a = 1, b = 0}", {"a": 1, "b": 0.5}, True),
        ("min_reward = {a = 1, b = 0}", {"a": 1}, False),
    ],
)
def test_min_reward(make_task: MakeTask, least: str, rewards: dict[str, float], goes_on: bool) -> None:
    assert load(make_task, one=least).stages[0].goes_on(Verdict(1.0, rewards)) is goes_on
