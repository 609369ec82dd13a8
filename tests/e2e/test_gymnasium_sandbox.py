"""The Gymnasium face with real boxes: however an episode is left, nothing of it stays behind."""

import functools
import os
import signal
import subprocess
import sys
import threading
import uuid

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from ares_exp import EpisodeTrajectory, LLMResponse
from ares_exp.wrappers import PresetGym, TextAction, TextObservation
from tests.leaks import processes, wait_until

pytestmark = pytest.mark.local

ID = "ares_exp.gym:ares_exp/Harbor-v0"
fork = pytest.param("fork", marks=pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"))
TASK = 'schema_version = "1.4"\n[task]\nname = "test/{name}"\n[environment]\nnetwork_mode = "no-network"\n'


def bash(command):
    return f"```bash\n{command}\n```"


def said(command):
    return LLMResponse.from_text(bash(command))


SUBMIT = said("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.fixture
def tasks(tmp_path):
    for name in ("a", "b", "c"):
        folder = tmp_path / "tasks" / name
        (folder / "environment").mkdir(parents=True)
        (folder / "tests").mkdir()
        (folder / "task.toml").write_text(TASK.format(name=name))
        (folder / "instruction.md").write_text(f"Task {name}: make /app/done.")
        (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
        (folder / "tests" / "test.sh").write_text("test -e /app/done; echo $((1 - $?)) > /logs/verifier/reward.txt\n")
    return tmp_path / "tasks"


class Sleepers:
    """Processes that an action starts in its box and that end with the box only."""

    def __init__(self):
        self.mark = f"61.{uuid.uuid4().int % 10**12:012}"
        self.leave = said(f"(setsid sleep {self.mark} >/dev/null 2>&1 &)")
        self.hang = said(f"sleep {self.mark}")

    def running(self):
        return sum(words.strip() == f"sleep {self.mark}" for _, _, _, words in processes())

    def are(self, count):
        return wait_until(lambda: self.running() == count, 30)


@pytest.fixture
def sleepers():
    made = Sleepers()
    threads = set(threading.enumerate())
    yield made
    assert made.are(0)
    assert wait_until(lambda: set(threading.enumerate()) <= threads, 30)


def test_script_needs_only_a_gymnasium_import(tasks, tmp_path):
    script = (
        "import gymnasium\n"
        f"env = gymnasium.make({ID!r}, path={str(tasks)!r}, tasks='b', render_mode='ansi', trajectory_dir='kept')\n"
        "observation, info = env.reset(seed=1)\n"
        "from ares_exp import LLMResponse\n"
        "for text in ('touch /app/done', 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'):\n"
        "    *_, reward, terminated, truncated, info = env.step(LLMResponse.from_text(f'```bash\\n{text}\\n```'))\n"
        "print(reward, terminated, truncated)\n"
        "print(env.render())\n"
        "env.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "1.0 True False"
    assert done.stdout.rstrip().endswith("[end] terminated, reward 1")
    [file] = (tmp_path / "kept").glob("*.json")
    assert EpisodeTrajectory.load(file).outcome == "completed"


def test_gymnasium_checks_pass(tasks):
    with gymnasium.make(ID, path=tasks, render_mode="ansi") as env:
        check_env(env.unwrapped)


def test_only_the_package_step_limit_is_scored(tasks):
    with gymnasium.make(ID, path=tasks, tasks="a", step_limit=1) as scored:
        scored.reset()
        assert scored.step(said("touch /app/done"))[1:4] == (1.0, False, True)
    with gymnasium.make(ID, path=tasks, tasks="a", max_episode_steps=1) as cut:
        cut.reset()
        assert cut.step(said("touch /app/done"))[1:4] == (0.0, False, True)


def test_episode_cut_by_gymnasium_ends_at_reset(tasks, sleepers, tmp_path):
    kept = tmp_path / "kept"
    env = gymnasium.make(ID, path=tasks, tasks="a", max_episode_steps=1, trajectory_dir=kept)
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    env.reset()
    *_, truncated, info = env.step(sleepers.leave)
    assert (truncated, info["episode"]["l"]) == (True, 1)
    assert sleepers.are(1)
    env.reset()
    assert sleepers.are(0)
    env.step(sleepers.leave)
    assert sleepers.are(1)
    env.close()
    env.close()
    assert sleepers.are(0)
    assert sorted(EpisodeTrajectory.load(file).outcome for file in kept.glob("*.json")) == ["abandoned", "closed"]


@pytest.mark.parametrize(
    "ending",
    [
        "os.kill(os.getpid(), 9)",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("pass", "raise SystemExit(3)")),
    ],
)
def test_program_without_close_leaves_no_container(tasks, sleepers, ending):
    script = (
        "import gymnasium, os\n"
        "from ares_exp import LLMResponse\n"
        f"env = gymnasium.make({ID!r}, path={str(tasks)!r}, tasks='a')\n"
        "env.reset()\n"
        f"env.step(LLMResponse.from_text({sleepers.leave.text!r}))\n"
        "print('ready', flush=True)\n"
        "input()\n"
        f"{ending}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "ready\n"
        assert sleepers.are(1)
        program.communicate("\n", timeout=60)
    assert program.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(ending, -signal.SIGKILL)


@pytest.mark.parametrize(
    "context", [fork, *(pytest.param(one, marks=pytest.mark.nightly) for one in ("spawn", "forkserver"))]
)
def test_environments_run_in_worker_processes(tasks, sleepers, context, tmp_path):
    factory = functools.partial(PresetGym, preset="harbor", path=tasks, trajectory_dir=tmp_path / "kept")
    envs = AsyncVectorEnv([factory] * 2, shared_memory=False, context=context, autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        envs.reset(seed=1)
        envs.step((sleepers.leave, said("touch /app/done")))
        assert sleepers.are(1)
        _, rewards, terminations, _, _ = envs.step((SUBMIT, SUBMIT))
        assert (rewards.tolist(), terminations.all()) == ([0.0, 1.0], True)
        assert sleepers.are(0)
        envs.step((sleepers.leave, sleepers.leave))
        assert sleepers.are(2)
    finally:
        envs.close()
    assert sleepers.are(0)
    outcomes = sorted(EpisodeTrajectory.load(file).outcome for file in (tmp_path / "kept").glob("*.json"))
    assert outcomes == ["closed", "closed", "completed", "completed"]


@pytest.mark.parametrize("context", [fork, pytest.param("spawn", marks=pytest.mark.nightly)])
def test_killed_workers_leave_no_container(tasks, sleepers, context):
    envs = AsyncVectorEnv(
        [functools.partial(PresetGym, preset="harbor", path=tasks)] * 2, shared_memory=False, context=context
    )
    envs.reset()
    envs.step((sleepers.leave, sleepers.leave))
    assert sleepers.are(2)
    os.kill(envs.processes[0].pid, signal.SIGKILL)
    assert sleepers.are(1)
    envs.close(terminate=True)
    assert sleepers.are(0)


def test_vector_environments_exchange_plain_strings(tasks):
    envs = gymnasium.make_vec(ID, num_envs=2, path=tasks, wrappers=[TextObservation, TextAction])
    try:
        observations, _ = envs.reset(options={"task": "a"})
        assert all("Task a: make /app/done." in text for text in observations)
        envs.step((bash("touch /app/done"),) * 2)
        assert envs.step((SUBMIT.text,) * 2)[1].tolist() == [1.0, 1.0]
    finally:
        envs.close()
