"""`env.share_setup` as a user meets it: runs with it and without, compared."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ares_exp.trajectories import load
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.request_diff import Match, RequestComparison
from tests.warm_start import warm_command

pytestmark = [pytest.mark.once, pytest.mark.local]

FILES = {
    "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir -p /app/old && touch /app/old/file\nWORKDIR /app\n",
    "task.toml": "[[steps]]\nname = 'one'\n",
    "steps/one/instruction.md": "Write 42 to /app/answer.\n",
    "steps/one/workdir/setup.sh": "set -e\nseq 1000 > numbers\nln -s numbers link\nchmod 4711 numbers\nrm -r old\n",
    "steps/one/tests/test.sh": "#!/bin/sh\ngrep -cx 42 /app/answer > /logs/verifier/reward.txt\n",
}
LOOK = "ls -lAR --time-style=+ /app /logs; cat numbers | wc -c; pwd; env | sort | grep -v -e ARES -e HOSTNAME; id"
REPLIES = (LOOK, "grep -x 42 link > answer", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def play(here: Path, run_dir: str, container: str, *, share: bool) -> list[EpisodeTrajectory]:
    replies = ",".join(f'"```bash\n{command}\n```"' for command in REPLIES)
    words = ["env.path=task", f"env.share_setup={str(share).lower()}", f"container={container}", "attempts=3"]
    words += ["concurrency=3", "tracker=none", "policy=scripted", f"policy.replies=[{replies}]"]
    command = [*warm_command(), *words, f"hydra.run.dir={run_dir}"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(load(here / run_dir).trajectories(), key=lambda episode: episode.metadata["attempt"])


@pytest.mark.parametrize(
    "container", [pytest.param("local", marks=pytest.mark.nightly), pytest.param("docker", marks=pytest.mark.docker)]
)
def test_runs_with_and_without_a_shared_setup_are_equal(tmp_path: Path, container: str) -> None:
    for name, text in FILES.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    without, shared = (play(tmp_path, f"share-{share}", container, share=share) for share in (False, True))
    assert [episode.total_reward for episode in shared] == [1.0] * 3
    for one, other in zip(without, shared, strict=True):
        comparison = RequestComparison()
        for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
            assert (a.action, a.reward, a.step_type) == (b.action, b.reward, b.step_type)
            if a.observation is not None:
                assert comparison.compare(number, a.observation, b.observation).match is Match.EXACT
