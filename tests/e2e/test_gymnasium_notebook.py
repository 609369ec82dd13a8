"""The Gymnasium face in a notebook, whose cells run inside an event loop: a real Jupyter kernel executes them."""

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


@pytest.mark.filterwarnings("default")  # of the client and its dependencies
def test_cells():
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, REFUSED, BLOCKING, LATER, AWAITED, LEFT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=60, kernel_name=_kernel(), startup_timeout=60).execute()
    said = ["".join(output.get("text", "") for output in cell.outputs).strip() for cell in notebook.cells]
    assert "AsyncGymWrapper" in said[1]
    assert "`wrap_as_gym(env, allow_running_loop=True)` blocks on purpose" in said[1]
    assert said[2:] == ["", "(0.0, False, False)", "(1.0, True, False)", "[]"]


def _kernel():
    from jupyter_client.kernelspec import KernelSpecManager

    manager = KernelSpecManager()
    assert manager.get_kernel_spec("python3").argv[0] in (sys.executable, "python")
    return "python3"
