import asyncio
import contextvars
import gc
import threading
import time
import weakref
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from ares_exp.environment import EnvironmentWrapper, complete
from ares_exp.errors import ContainerDiedError
from ares_exp.wrappers import loop_thread, sync_gym
from ares_exp.wrappers.async_gym import drive_async_gym
from ares_exp.wrappers.sync_gym import drive_sync_gym
from tests.unit.wrappers.gym_environments import (
    ACTION,
    BareEnvironment,
    BlockingEnvironment,
    CountingEnvironment,
    ForeignEnvironment,
    RaisingEnvironment,
    StubbornEnvironment,
)

DRIVERS = [complete, drive_async_gym, drive_sync_gym]
CONF = Path(__file__).parents[3] / "conf" / "wrapper"


@pytest.fixture(params=DRIVERS)
def drive(request):
    return request.param


async def is_set(event):
    assert await asyncio.to_thread(event.wait, 60)


async def execute(driver):
    async with EnvironmentWrapper(driver):
        time_steps = [await driver.reset()]
        while time_steps[-1].step_type != "LAST":
            time_steps.append(await driver.step(ACTION))
    return time_steps


@pytest.mark.parametrize("option", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
async def test_every_option_runs_the_same_episode(option):
    wrapper = hydra.utils.instantiate(OmegaConf.load(option))
    for make in (BareEnvironment, CountingEnvironment, lambda: CountingEnvironment(truncate=True), ForeignEnvironment):
        assert await execute(wrapper(make())) == await execute(make())


@pytest.mark.parametrize("error", [ContainerDiedError("gone"), TimeoutError("late"), RuntimeError("x")], ids=repr)
async def test_exception_of_the_environment_is_raised_unchanged(drive, error):
    env = RaisingEnvironment(error)
    with pytest.raises(type(error)) as caught:
        await execute(drive(env))
    assert caught.value is error
    assert env.exits == [type(error)]


async def test_cancelled_step_cancels_the_environment(drive):
    env = BlockingEnvironment()
    async with drive(env) as driver:
        await driver.reset()
        step = asyncio.create_task(driver.step(ACTION))
        await is_set(env.stepping)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert env.unwound == 1
        assert (await driver.reset()).step_type == "FIRST"
    assert env.closed == 1
    await driver.close()  # again


async def test_environment_sees_a_cancelled_body(drive):
    env = BlockingEnvironment()
    episode = asyncio.create_task(execute(drive(env)))
    await is_set(env.stepping)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert (env.unwound, env.exits, env.closed) == (1, [asyncio.CancelledError], 1)


@pytest.mark.parametrize("loop_turns", [0, 1, 2, 5, 20])
async def test_cancellation_at_any_moment_is_delivered(drive, loop_turns, monkeypatch):
    for module in (sync_gym, loop_thread):
        monkeypatch.setattr(module, "CANCEL_GRACE_SEC", 60.0)
    env = BlockingEnvironment()
    async with drive(env) as driver:
        started = time.monotonic()
        for _ in range(20):
            step = asyncio.create_task(driver.step(ACTION))
            for _ in range(loop_turns):
                await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        assert time.monotonic() - started < 50  # one that is missed waits out the grace
        assert (await driver.reset()).step_type == "FIRST"


async def test_episode_cancelled_at_any_moment_is_closed():
    environments = [CountingEnvironment(length=30) for _ in range(20)]
    drivers = [drive_sync_gym(env) for env in environments]  # kept: not the safety net is under test
    for number, driver in enumerate(drivers):
        episode = asyncio.create_task(execute(driver))
        while environments[number].count < 2 * number and not episode.done():  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
    assert all(env.closed for env in environments[1:])
    assert any(0 < env.count < 30 for env in environments)


async def test_cancelled_close_of_sync_driver_completes():
    class SlowToClose(CountingEnvironment):
        async def close(self):
            await asyncio.sleep(0.05)
            await super().close()

    for turns in range(1, 10):
        env = SlowToClose()
        driver = drive_sync_gym(env)
        await driver.reset()
        close = asyncio.create_task(driver.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        close.cancel()
        with pytest.raises(asyncio.CancelledError):
            await close
        assert env.closed == 1


async def test_step_ignoring_cancellation_is_abandoned(monkeypatch):
    for module in (sync_gym, loop_thread):
        monkeypatch.setattr(module, "CANCEL_GRACE_SEC", 0.5)
    env = StubbornEnvironment()
    before = set(threading.enumerate())
    driver = drive_sync_gym(env)
    await driver.reset()
    step = asyncio.create_task(driver.step(ACTION))
    await is_set(env.stepping)
    assert len(set(threading.enumerate()) - before) >= 2
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(step, 30)
    await asyncio.wait_for(driver.close(), 60)
    assert env.closed == 1


async def test_sync_driver_has_own_loop_and_callers_context():
    variable = contextvars.ContextVar("variable", default="unset")

    class Reading(CountingEnvironment):
        async def step(self, action):
            self.read = variable.get()
            return await super().step(action)

    env = Reading(length=1)
    variable.set("episode 7")
    await execute(drive_sync_gym(env))
    assert env.read == "episode 7"
    assert env.threads == {"gym of Reading"}


async def test_dropped_sync_driver_closes_the_environment():
    class Telling(CountingEnvironment):
        async def close(self):
            await super().close()
            told.set()

    told = threading.Event()
    driver = drive_sync_gym(Telling())
    await driver.reset()
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    assert gone() is None
    await is_set(told)  # not at once: the worker thread may hold the wrapper a moment longer
