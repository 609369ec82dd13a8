"""`container=daytona` as a user meets it: against a service on this machine, in whatever way a run ends."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp import LLMResponse
from tests.conftest import rows, run_command
from tests.e2e.daytona_service import DaytonaService
from tests.leaks import wait_until
from tests.warm_start import WITH_DAYTONA, WarmProcess, warm_command

pytestmark = [pytest.mark.once, pytest.mark.local]

SUBMIT = LLMResponse.from_text("```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```")


@pytest.fixture(scope="module")
def service() -> Iterator[DaytonaService]:
    with DaytonaService() as service:
        yield service


@pytest.fixture(autouse=True)
def _environment(service: DaytonaService, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables of the service for all that is started here; and nothing left there after it."""
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    yield
    assert service.is_empty(), [one.name for one in service.sandboxes()]
    assert service.emulator.unknown == service.emulator.invalid == []


def execute(service: DaytonaService, here: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_command((*warm_command(also=WITH_DAYTONA), "tracker=none", *words), here, {**service.env, **env})


def start(directory: Path, *words: str) -> WarmProcess:
    """A run whose episodes are in the middle of a long command before long."""
    command = "policy.replies=['```bash\ntouch /started; sleep 4325\n```']"
    return WarmProcess(
        ["container=daytona", "policy=scripted", command, "tracker=none", *words], cwd=directory, also=WITH_DAYTONA
    )


def started(service: DaytonaService, process: WarmProcess) -> int:
    typed = service.emulator.traffic.typed
    return sum(b"sleep 4325" in typed.get(one.id, b"") for one in service.sandboxes(process.pid))


def end(process: WarmProcess, number: signal.Signals) -> str:
    os.kill(process.pid, number)
    return process.communicate(timeout=90)[1]


def clean(*words: str) -> str:
    command = [*warm_command("ares_exp", WITH_DAYTONA), "clean", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def test_tasks_are_solved_and_key_is_hidden(service: DaytonaService, tmp_path: Path) -> None:
    done = execute(service, tmp_path, "container=daytona", "env.limit=2", "hydra.run.dir=run", "wrapper=sync")
    assert done.returncode == 0, done.stderr
    results = rows(tmp_path / "run")
    assert len(results) == 2
    assert {row["task_name"]: (row["outcome"], row["reward"]) for row in results} == {
        row["task_name"]: ("completed", 1.0) for row in results
    }
    texts = [done.stdout, done.stderr, *(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())]
    assert not [text for text in texts if service.emulator.api_key in text]
    assert service.emulator.url in service.env.values()


# What a user gets wrong


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        ((), {"DAYTONA_API_KEY": ""}, ["DAYTONA_API_KEY", "DAYTONA_API_URL"]),
        ((), {"DAYTONA_API_URL": "http://127.0.0.1:9/api"}, ["127.0.0.1:9", "Check DAYTONA_API_URL"]),
        ((), {"DAYTONA_API_KEY": "dtn_which_nobody_has_made"}, ["returned 401", "Check DAYTONA_API_KEY"]),
        (("container.ttl_min=1",), {}, ["1260 s", "ttl_min=1 is too short", "container.ttl_min=31"]),
    ],
    ids=["no key", "no service", "wrong key", "short TTL"],
)
def test_daytona_mistakes_are_explained_in_one_line(
    service: DaytonaService, tmp_path: Path, words: tuple[str, ...], env: dict[str, str], expected: list[str]
) -> None:
    asked = len(service.emulator.requests)
    done = execute(service, tmp_path, "container=daytona", *words, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert [part for part in expected if part not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "dtn_" not in done.stderr
    assert not list(tmp_path.glob("outputs/*/*/episodes.jsonl"))
    assert len(service.emulator.requests) - asked <= 1


# Runs that are ended


def test_ctrl_c_leaves_no_sandboxes(service: DaytonaService, tmp_path: Path) -> None:
    process = start(tmp_path, "hydra.run.dir=run", "env.limit=3", "concurrency=3")
    try:
        assert wait_until(lambda: started(service, process) == 3 or process.poll() is not None)
        said = end(process, signal.SIGINT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    left = service.sandboxes(process.pid)
    assert [one for one in left if one.state != "destroying"] == [], "their removal is asked for before it ends"
    assert [row["outcome"] for row in rows(tmp_path / "run")] == ["cancelled"] * 3


def test_sandboxes_of_a_killed_run_are_cleaned(service: DaytonaService, tmp_path: Path) -> None:
    """No other run takes it from a living one; from a dead one the TTL, `clean` and the next run take it."""
    words = ("env.limit=1", "concurrency=3", "attempts=3", "container.ttl_min=30")
    process = start(tmp_path, *words)
    try:
        assert wait_until(lambda: started(service, process) == 3 or process.poll() is not None)
        assert execute(service, tmp_path, "container=daytona", "env.limit=1").returncode == 0
        left = {one.name: one for one in service.sandboxes(process.pid)}
        assert [one.state for one in left.values()] == ["started"] * 3
        said = end(process, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, said
    finally:
        process.kill()
        process.communicate()
    assert len(service.sandboxes(process.pid)) == 3
    first, *others = left.values()

    def time_flies() -> None:
        sandboxes = service.emulator.service
        sandboxes.minute = 0.01
        sandboxes.set_ttl(first, first.ttl)
        sandboxes.minute = 60

    service.do(time_flies)
    assert wait_until(lambda: len(service.sandboxes(process.pid)) == 2)
    listed = clean("--dry-run")
    assert all(f"sandbox        {one.name}  of process {process.pid} on" in listed for one in others)
    assert len(service.sandboxes(process.pid)) == 2
    assert "removed" in clean()
    assert service.is_empty()
