"""`branch_from=` as a user meets it: a recorded run, and commands that continue from one of its steps."""

import subprocess
from pathlib import Path

import pytest

from ares_exp.trajectories import load
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.conftest import rows
from tests.warm_start import warm_command

pytestmark = [pytest.mark.once, pytest.mark.local]

DRAW = "```bash\necho x$RANDOM$RANDOM > /tmp/drawn; cat /tmp/drawn\n```"  # plain digits may be taken for a time
GREET = "```bash\necho 'Hello, harbor!' > /app/greeting.txt\n```"
SHOW = "```bash\ncat /tmp/drawn\n```"
SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"


def quoted(text: str) -> str:
    """As Hydra's grammar requires: only quotes are escaped."""
    return '"' + text.replace('"', '\\"') + '"'


def execute(
    here: Path, run_dir: str, *overrides: str, replies: list[str], container: str = "local"
) -> subprocess.CompletedProcess[str]:
    words = [
        "tracker=none",
        f"policy.replies=[{','.join(map(quoted, replies))}]",
        f"hydra.run.dir={run_dir}",
        *overrides,
    ]
    if not any(word.startswith("branch_from=") for word in overrides):
        words += ["policy=scripted", "env.tasks=write-greeting", f"container={container}"]
    return subprocess.run([*warm_command(), *words], cwd=here, capture_output=True, text=True, timeout=110, check=False)


def episodes(here: Path, run_dir: str) -> list[EpisodeTrajectory]:
    return sorted(load(here / run_dir).trajectories(), key=lambda episode: episode.metadata["attempt"])


def shown(episode: EpisodeTrajectory, step: int) -> str:
    observation = episode.steps[step].observation
    assert observation is not None
    return str(observation["messages"][-1]["content"])


def the_same(a: EpisodeTrajectory, b: EpisodeTrajectory, steps: int) -> bool:
    """Whether two episodes agree in their first steps, but for the clock."""
    pairs = zip(a.steps[:steps], b.steps[:steps], strict=True)
    return all((x.observation, x.action, x.reward) == (y.observation, y.action, y.reward) for x, y in pairs)


@pytest.mark.parametrize(
    "container", [pytest.param("local", marks=pytest.mark.nightly), pytest.param("docker", marks=pytest.mark.docker)]
)
def test_eight_branches_share_the_earlier_steps(tmp_path: Path, container: str) -> None:
    first = execute(tmp_path, "a", "snapshot=every_step", replies=[DRAW, SUBMIT], container=container)
    assert first.returncode == 0, first.stderr
    branched = execute(
        tmp_path, "b", "branch_from=a/write-greeting@1", "branches=8", "concurrency=8", replies=[SHOW, GREET, SUBMIT]
    )
    assert branched.returncode == 0, branched.stderr
    [recorded], branches = episodes(tmp_path, "a"), episodes(tmp_path, "b")
    assert [row["reward"] for row in rows(tmp_path / "a")] == [0.0]
    assert [row["reward"] for row in rows(tmp_path / "b")] == [1.0] * 8
    assert [row["num_steps"] for row in rows(tmp_path / "b")] == [3] * 8  # the shared responses were paid before
    for number, branch in enumerate(branches):
        lineage = branch.metadata["lineage"]
        assert (lineage["root"], lineage["parent"]) == (recorded.episode_id, recorded.episode_id)
        assert (lineage["step"], lineage["branch"]) == (1, number)
        assert the_same(recorded, branch, 2)
        drawn = shown(recorded, 1)
        assert drawn.splitlines()[2] in shown(branch, 2), "the file is there, and the command was not run again"
        assert branch.num_steps == 5


def test_branch_without_snapshots_replays_earlier_steps(tmp_path: Path) -> None:
    assert execute(tmp_path, "a", replies=[GREET, DRAW, SUBMIT]).returncode == 0
    branched = execute(tmp_path, "b", "branch_from=a/write-greeting@1", "branches=2", replies=[SUBMIT])
    assert branched.returncode == 0, branched.stderr
    assert "differs" not in branched.stderr
    assert all(the_same(episodes(tmp_path, "a")[0], branch, 2) for branch in episodes(tmp_path, "b"))
    assert [row["reward"] for row in rows(tmp_path / "b")] == [1.0, 1.0]
    random = execute(tmp_path, "c", "branch_from=a/write-greeting@2", "branches=2", replies=[SHOW, SUBMIT])
    assert random.returncode == 0, random.stderr
    assert "differs from the recorded episode in 1 request, from step 2 on" in random.stderr
    one, other = episodes(tmp_path, "c")
    assert the_same(one, other, 4), "both start from what it came to be"


def test_branch_between_snapshots_starts_from_the_earlier_one(tmp_path: Path) -> None:
    count = "```bash\necho x >> /tmp/count; wc -l < /tmp/count\n```"
    every = ("snapshot=every_n", "snapshot.every=2")
    assert execute(tmp_path, "a", *every, replies=[DRAW, count, count, SUBMIT]).returncode == 0
    options = ("branch_from=a/write-greeting@3", "branches=2", "branch.inject=Go on.", "snapshot=none")
    refused = execute(tmp_path, "c", options[0], "agent.max_output_chars=200", replies=[SUBMIT])
    assert (refused.returncode, "max_output_chars" in refused.stderr) == (2, True), refused.stderr
    branched = execute(tmp_path, "b", *options, replies=[SHOW, SUBMIT])
    assert branched.returncode == 0, branched.stderr
    assert "differs" not in branched.stderr
    [recorded], branches = episodes(tmp_path, "a"), episodes(tmp_path, "b")
    for branch in branches:
        assert the_same(recorded, branch, 3)
        assert shown(branch, 3) == "Go on."
        assert shown(recorded, 1).splitlines()[2] in shown(branch, 4), "the first command was not run again"
        assert branch.metadata["lineage"]["root"] == recorded.episode_id


def test_branch_works_without_task_selection(tmp_path: Path) -> None:
    (tmp_path / "options" / "env").mkdir(parents=True)
    (tmp_path / "options" / "env" / "plain.yaml").write_text("# all of them\n_target_: plain.PlainEnvironments\n")
    (tmp_path / "plain.py").write_text(
        "from ares_exp.environments.harbor import HarborEnvironments\n\n\n"
        "class PlainEnvironments(HarborEnvironments):\n"
        "    def __init__(self):\n"
        "        super().__init__(limit=2)\n"
    )
    words = ("--config-dir", "options", "env=plain", "policy=scripted", f"policy.replies=[{quoted(SUBMIT)}]")
    ran = [*warm_command(), *words, "tracker=none", "snapshot=every_step", "hydra.run.dir=a"]
    subprocess.run(ran, cwd=tmp_path, check=True, timeout=110, capture_output=True)
    task = rows(tmp_path / "a")[1]["task_name"]
    branched = execute(tmp_path, "b", f"branch_from=a/{task}@0", "branches=2", replies=[SUBMIT])
    assert branched.returncode == 0, branched.stderr
    assert [row["task_name"] for row in rows(tmp_path / "b")] == [task, task]
    gone = execute(tmp_path, "c", f"branch_from=a/{task}@0", "env=twenty_questions", replies=[SUBMIT])
    assert gone.returncode == 2
    assert "no `export_state`" in gone.stderr


def test_edited_branch_is_branched_without_snapshots(tmp_path: Path) -> None:
    assert execute(tmp_path, "a", replies=[GREET, SUBMIT]).returncode == 0
    for run_dir, start, text in (("b", "a/write-greeting@1", "First."), ("c", "b/write-greeting@2", "Second.")):
        branched = execute(
            tmp_path, run_dir, f"branch_from={start}", f"branch.inject={text}", replies=["```bash\npwd\n```", SUBMIT]
        )
        assert branched.returncode == 0, branched.stderr
        assert "differs" not in branched.stderr
    [a], [b], [c] = (episodes(tmp_path, run) for run in "abc")
    lineage = c.metadata["lineage"]
    assert (lineage["root"], lineage["parent"], lineage["step"]) == (a.episode_id, b.episode_id, 2)
    assert [(edit["text"], edit["step"]) for edit in c.metadata["edits"]] == [("First.", 1), ("Second.", 2)]
    assert the_same(b, c, 2)
    assert (shown(c, 1), shown(c, 2)) == ("First.", "Second.")
    done = execute(tmp_path, "d", "branch_from=c/write-greeting@3", replies=[SUBMIT])
    assert done.returncode == 0, done.stderr
    assert "differs" not in done.stderr


def test_branch_starts_with_edits_and_responses(tmp_path: Path) -> None:
    assert execute(tmp_path, "a", "snapshot=every_step", replies=[DRAW, SUBMIT]).returncode == 0
    branched = execute(
        tmp_path,
        "b",
        "branch_from=a/write-greeting@1",
        f"branch.response={quoted(GREET)}",
        "branch.inject=Look around first.",
        "branch.edit=It printed nothing.",
        replies=[SHOW, SUBMIT],
    )
    assert branched.returncode == 0, branched.stderr
    [branch] = episodes(tmp_path, "b")
    assert branch.total_reward == 1.0
    for step in (1, 2, 3):
        observation = branch.steps[step].observation
        assert observation is not None
        contents = [message["content"] for message in observation["messages"]]
        assert contents[2:4] == ["It printed nothing.", "Look around first."], "in every request from there on"
    assert "It printed nothing." not in shown(branch, 0)
    action = branch.steps[2].action
    assert action is not None
    assert action["data"] == ({"content": GREET},)
