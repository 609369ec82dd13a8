"""Objects left on the engine by runs that were ended in the middle, with 32 containers up."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import APIError

from tests.leaks import BOXES, CASES, Phase, Run, clean, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.once, pytest.mark.timeout(300)]


@pytest.fixture
def run(tmp_path: Path, api: docker.APIClient) -> Iterator[Run]:
    def boxes(run: Run) -> int:
        return len(containers(api, run))

    seen = set[str]()  # a question each costs the engine much, and none that was busy is idle again

    def busy(run: Run) -> int:
        found = containers(api, run)
        for one in found if len(found) == BOXES else ():
            if one not in seen and not runs(api, one, run.mark):
                break  # it makes no difference how many are not
            seen.add(one)
        return len(seen)

    run = Run("docker", tmp_path, boxes, busy)
    yield run
    run.process.kill()
    run.process.wait()
    assert wait_until(lambda: clean(run.env) and not left(api, run))


def containers(api: docker.APIClient, run: Run) -> list[str]:
    return [one["Id"] for one in api.containers(all=True, filters={"label": f"ares_exp.pid={run.process.pid}"})]


def runs(api: docker.APIClient, container: str, words: str) -> bool:
    """Whether a process of the container has these words in its command line."""
    try:
        return any(words in one[-1] for one in api.top(container)["Processes"])
    except APIError:
        return False  # not started yet


def left(api: docker.APIClient, run: Run) -> list[str]:
    ours = {"label": f"ares_exp.pid={run.process.pid}"}
    networks = [one["Name"] for one in api.networks(filters=ours)]
    volumes = [one["Name"] for one in api.volumes(filters=ours)["Volumes"] or []]
    return [*containers(api, run), *networks, *volumes, *run.processes(), *run.files()]


@pytest.mark.parametrize(
    ("phase", "number"),
    [case if case[0] == "exec" else pytest.param(*case, marks=pytest.mark.nightly) for case in CASES],
)
def test_ended_run_leaves_no_objects(run: Run, api: docker.APIClient, phase: Phase, number: signal.Signals) -> None:
    run.reach(phase)
    started = run.end(number)
    assert wait_until(lambda: not left(api, run)), left(api, run)
    print(f"nothing left {time.monotonic() - started:.2f} s after the end")
