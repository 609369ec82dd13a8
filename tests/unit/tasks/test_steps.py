"""What a step of a multi-step task does in a real container: its set-up, its tests, its solution."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ares_exp.containers.container import Container
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import StepSetupError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.task_contract import Verdict

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


async def test_a_script_that_fails(make_task: MakeTask) -> None:
    task = load(make_task, one="healthcheck.command = 'touch /checked'",
                **{"steps/one/workdir/setup.sh": "echo no luck >&2; exit 9"})  # fmt: skip
    async with set_up(task) as box:
        with pytest.raises(StepSetupError, match=r"(?s)setup\.sh of step 'one' gave exit code 9; .*\nno luck"):
            await task.stages[0].start(box)
        assert (await box.exec("ls /checked")).exit_code != 0


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
