"""Verification from start to end, and verifiers with a container of their own."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerFactory
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import AddTestsDirError, RewardFileNotFoundError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.task_set import SAMPLES, load_task_set
from tests.unit.tasks.conftest import episode

MakeTask = Callable[..., Path]
SAMPLE_TASKS = load_task_set(SAMPLES)[0]

# What someone might do in a container; the reward that it is worth.
RESPONSES = [
    ("access-log-report", "awk '$(NF - 1) >= 500' access.log > errors.txt", 0.5),
    ("access-log-report", "grep ' 5[0-9][0-9] ' access.log > errors.txt", 0.5),
    ("access-log-report", "grep 500 access.log > errors.txt", 0.0),
    ("count-records", "echo ' 6' > answer.txt", 1.0),
    ("count-records", "grep -cE '^[0-9]+,[45],' feedback.csv > answer.txt", 0.0),
    ("count-records", "echo 6 records > answer.txt", 0.0),
    ("fix-moving-average", "sed -i 's/- window)/- window + 1)/; s,//,/,' smoothing/averages.py", 0.0),
    ("fix-moving-average", "echo 'import os; os._exit(0)' > smoothing/__init__.py", 0.0),
    ("fix-moving-average", "rm -r tests", 0.0),
    ("monthly-revenue", "sed 's/row.\"order_id\". in seen or//' /solution/solve.sh | bash", 0.0),
    ("monthly-revenue", "echo '{}' > revenue.json", 0.0),
    ("publish-release", "sed '/ln -sfn/d' /solution/solve.sh | bash", 0.0),
    ("write-greeting", "printf 'Hello, harbor!' > greeting.txt", 0.0),
]


@pytest.fixture(
    params=[
        pytest.param("local", marks=pytest.mark.local),
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.once, pytest.mark.nightly]),
    ]
)
def factory(request: pytest.FixtureRequest) -> ContainerFactory:
    """Each backend that is here, with login shells for all that says nothing; the others skip with their reason."""
    if request.param == "local":
        from ares_exp.containers.local import LocalContainerFactory

        return LocalContainerFactory(shell="bash -lc")
    from ares_exp.containers.docker import DockerContainerFactory

    return DockerContainerFactory(shell="bash -lc")


@pytest.mark.parametrize("task", SAMPLE_TASKS, ids=lambda task: task.name)
async def test_only_the_solution_solves_the_samples(task: HarborTask, factory: ContainerFactory) -> None:
    async with episode(task, factory) as container:
        untouched = await task.stages[0].verify(container, None)
        env = await task.stages[0].upload_solution(container)
        run = await container.exec("/solution/solve.sh", env=env, user=task.stages[0].agent_user)
        solved = await task.stages[0].verify(container, None)
    assert (untouched.reward, run.exit_code, solved.reward) == (0.0, 0, 1.0), run.output


@pytest.mark.parametrize(
    ("name", "command", "reward"), RESPONSES, ids=[f"{response[0]}-{index}" for index, response in enumerate(RESPONSES)]
)
async def test_samples_distinguish_right_from_wrong(
    factory: ContainerFactory, name: str, command: str, reward: float
) -> None:
    task = load_task(SAMPLES / name)
    async with episode(task, factory) as container:
        env = await task.stages[0].upload_solution(container)
        await container.exec(command, env=env)
        assert (await task.stages[0].verify(container, None)).reward == reward


async def test_agent_profile_files_do_not_affect_verification(
    make_task: MakeTask, factory: ContainerFactory, tmp_path: Path
) -> None:
    task = load_task(
        make_task(
            toml='artifacts = [{source = "/app/left", exclude = ["*.tmp"]}]\n',
            files={"tests/test.sh": "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n"},
        )
    )
    async with episode(task, factory) as container:
        await container.exec(
            "mkdir -p /app/left; touch /app/left/one; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
        )
        await container.exec("echo 'rm() { :; }; test() { exit 4; }; tar() { exit 4; }' >> /etc/profile")
        await task.stages[0].collect(container, tmp_path / "artifacts")
        verdict = await task.stages[0].verify(container, tmp_path / "verifier")
    assert verdict.reward == 0
    assert [path.name for path in (tmp_path / "artifacts" / "app" / "left").iterdir()] == ["one"]


async def test_failed_verification_leaves_no_host_files(
    make_task: MakeTask, factory: ContainerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(make_task(files={"tests/test.sh": "#!/bin/bash\n"}))
    async with episode(task, factory) as container:
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        with pytest.raises(RewardFileNotFoundError):
            await task.stages[0].verify(container, None)
        assert list((tmp_path / "tmp").iterdir()) == []


async def test_deleted_tests_are_an_error(make_task: MakeTask, factory: ContainerFactory) -> None:
    task = load_task(make_task())
    (task.path / "tests" / "test.sh").unlink()
    (task.path / "tests").rmdir()
    async with episode(task, factory) as container:
        with pytest.raises(AddTestsDirError, match="tests"):
            await task.stages[0].verify(container, None)


STEP = "[[steps]]\nname = 'a'\n"
STEP_FILES = {"steps/a/instruction.md": ""}
NONE = "network_mode = 'no-network'\n"


@pytest.mark.parametrize(
    ("toml", "start", "tests"),
    [
        (f"[verifier]\n{NONE}[verifier.environment]", PUBLIC, NO_NETWORK),
        (f"[verifier.environment]\n{NONE}{STEP}verifier.network_mode = 'public'", NO_NETWORK, PUBLIC),
    ],
)
def test_separate_verifier_has_its_network(
    make_task: MakeTask, toml: str, start: NetworkPolicy, tests: NetworkPolicy
) -> None:
    (stage,) = load_task(make_task(toml=toml, files=STEP_FILES)).stages
    spec = stage.verifier_spec
    assert (spec.network, stage.verifier_network, spec.networks) == (start, tests, {start, tests})
