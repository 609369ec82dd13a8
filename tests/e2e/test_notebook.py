"""Gymnasium, runs and rollouts in a notebook, whose cells run inside an event loop: a real kernel executes them."""

import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")

ROOT = Path(__file__).parent.parent.parent

SETUP = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from ares_exp import wrap_as_gym
from tests.unit.wrappers.gym_environments import ACTION, AgentEnvironment, CountingEnvironment
before = set(threading.enumerate())
"""
REFUSED = """
gym = wrap_as_gym(CountingEnvironment())
try:
    gym.reset()
except RuntimeError as error:
    print(error)
"""
BLOCKING = """
env = AgentEnvironment()
gym = wrap_as_gym(env, allow_running_loop=True)
observation, info = gym.reset()
"""
LATER = """
assert env.enough.wait(20)  # the agent went on between the cells
print(gym.step(ACTION)[1:4])
gym.close()
"""
AWAITED = """
async with wrap_as_gym(CountingEnvironment(length=1), async_mode=True) as gym:
    await gym.reset()
    print((await gym.step(ACTION))[1:4])
"""
LEFT = """
del gym
print([thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("gym")])
"""


RUN = """
import ares_exp
one = ["env.tasks=write-greeting", "tracker=none"]
results = ares_exp.run(one)
"""
FRAME = """
print(results.to_frame()["reward"].tolist(), (await ares_exp.arun(one, quiet=True)).mean_reward)
"""
ROLLOUTS = """
async for episode in ares_exp.rollouts(env="harbor", policy="oracle", overrides=["env.tasks=write-greeting"]):
    print(episode.task_name, episode.reward)
"""


def ran(*sources, folder):
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name=_kernel(), startup_timeout=60, resources=resources
    )
    client.execute()
    return ["".join(output.get("text", "") for output in cell.outputs).strip() for cell in notebook.cells]


@pytest.mark.local
@pytest.mark.filterwarnings("default")  # of the client and its dependencies
def test_gymnasium_runs_and_rollouts_work_in_a_notebook(tmp_path):
    said = ran(SETUP, REFUSED, BLOCKING, LATER, AWAITED, LEFT, RUN, FRAME, ROLLOUTS, folder=tmp_path)
    assert "pass `allow_running_loop=True` to `gymnasium.make` or `wrap_as_gym`" in said[1]
    assert said[2:6] == ["", "(0.0, False, False)", "(1.0, True, False)", "[]"]
    assert "mean reward 1.00" in said[6]
    assert "1/1 done" in said[6]
    assert said[7:] == ["[1.0] 1.0", "write-greeting 1.0"]


def _kernel():
    from jupyter_client.kernelspec import KernelSpecManager

    manager = KernelSpecManager()
    assert manager.get_kernel_spec("python3").argv[0] in (sys.executable, "python")
    return "python3"
