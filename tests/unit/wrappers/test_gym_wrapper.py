import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from ares_exp.wrappers.async_gym import wrap_as_gym
from tests.unit.wrappers import gym_environments


def test_agent_runs_between_calls():
    env = gym_environments.AgentEnvironment()
    with wrap_as_gym(env) as gym:
        gym.reset()
        assert env.enough.wait(60)
        gym.step(gym_environments.ACTION)
    assert env.agent.cancelled()


def test_environment_failing_to_enter_is_closed():
    class Unenterable(gym_environments.PlainEnvironment):
        async def __aenter__(self):
            raise OSError("no room")

    env = Unenterable()
    gym = wrap_as_gym(env)
    with pytest.raises(OSError, match="no room"), gym:
        raise AssertionError("unreachable")
    assert env.closed == 1


async def test_running_loop_is_refused():
    env = gym_environments.CountingEnvironment()
    gym = wrap_as_gym(env)
    for call in (gym.reset, lambda: gym.step(gym_environments.ACTION), gym.close, gym.__enter__):
        with pytest.raises(
            RuntimeError, match=r"A GymWrapper .*`allow_running_loop=True` to `gymnasium.*async_mode=True"
        ):
            call()
    await asyncio.to_thread(gym.close)
    gym.close()  # closed already: nothing to block for
    assert env.closed == 1


async def test_notebook_may_block_its_loop():
    with wrap_as_gym(gym_environments.CountingEnvironment(length=1), allow_running_loop=True) as gym:
        gym.reset()
        assert gym.step(gym_environments.ACTION)[2] is True


def test_close_is_idempotent():
    env = gym_environments.CountingEnvironment()
    gym = wrap_as_gym(env)
    gym.reset()
    gym.close()
    gym.close()
    assert env.closed == 1
    with pytest.raises(RuntimeError, match="has been closed"):
        gym.step(gym_environments.ACTION)


def test_ctrl_c_cancels_the_step():
    env = gym_environments.BlockingEnvironment()
    main = threading.main_thread().ident

    def press():
        if env.stepping.wait(60):
            signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=press)
    with wrap_as_gym(env) as gym:
        gym.reset()
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            gym.step(gym_environments.ACTION)
        assert env.unwound == 1
        assert gym.reset()[1]["time_step"].first()
    presser.join(60)


def test_dropped_wrapper_closes_the_environment():
    env = gym_environments.CountingEnvironment()
    gym = wrap_as_gym(env)
    gym.reset()
    gone = weakref.ref(gym)
    del gym
    assert gone() is None
    assert env.closed == 1


def test_wrapper_collected_on_its_thread_closes_environment():
    env = gym_environments.CountingEnvironment()
    gym = wrap_as_gym(env)
    gym.reset()
    gym.cycle = gym
    loop_thread, gone = gym.loop_thread, weakref.ref(gym)

    async def collect():
        gc.collect()

    before = threading.enumerate()
    gc.disable()
    try:
        del gym
        loop_thread.run(collect())
    finally:
        gc.enable()
    next(t for t in before if t.name == "gym of CountingEnvironment").join(60)
    assert gone() is None
    assert env.closed == 1


SCRIPT = """
import os, sys, threading
from tests.unit.wrappers.gym_environments import ACTION, BlockingEnvironment, CountingEnvironment
from ares_exp.wrappers.sync_gym import GymWrapper

class Telling(CountingEnvironment):
    async def close(self):
        print("closed by", os.getpid() - pid, flush=True)

pid = os.getpid()
"""


def run_script(body):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=90,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_program_exit_closes_a_used_environment():
    done = run_script("unused, gym = GymWrapper(Telling()), GymWrapper(Telling())\ngym.reset()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed by 0\n", "")


def test_endless_daemon_step_does_not_block_exit():
    done = run_script(
        "env = BlockingEnvironment(); gym = GymWrapper(env); gym.reset()\n"
        "threading.Thread(target=gym.step, args=(ACTION,), daemon=True).start()\n"
        "assert env.stepping.wait(60)\n"
    )
    assert done.returncode == 0, done.stderr


def test_forked_process_reports_the_missing_loop():
    done = run_script(
        "import warnings; warnings.simplefilter('ignore')\n"
        "gym = GymWrapper(Telling()); gym.reset()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        gym.step(ACTION)\n"
        "    except RuntimeError as error:\n"
        "        print(str(error)[:39], flush=True)\n"
        "    gym.close()\n"
        "    del gym\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "gym.step(ACTION)\n"
        "gym.close()\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The thread 'gym of Telling' was started\nclosed by 0\n"
    assert "Traceback" not in done.stderr
