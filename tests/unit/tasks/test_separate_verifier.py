"""Verifiers with a container of their own: what it is made from, and what is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.tasks.harbor_task import HarborTask, load_task

MakeTask = Callable[..., Path]
Files = Mapping[str, str | None]

STEP = "[[steps]]\nname = 'a'\n"
STEP_FILES = {"steps/a/instruction.md": ""}
SEPARATE = "environment_mode = 'separate'\n"
STEPS_DEFINITION = {"steps/a/tests/Dockerfile": "FROM scratch\n"}
TASK_IMAGE, STEP_IMAGE = (
    "[verifier.environment]\ndocker_image = 'of-task'\n",
    "verifier.environment.docker_image = 'of-step'\n",
)

# What; task.toml; files; the image, or the directory with its definition; whether the tests are uploaded.
IMAGES: list[tuple[str, str, Files, str, bool]] = [
    ("the agent's, which is prebuilt", f"[environment]\ndocker_image = 'x'\n[verifier]\n{SEPARATE}", {}, "x", True),
    ("an empty table", "[verifier.environment]", {}, "environment", True),
    ("an image, no tests", TASK_IMAGE, {"tests/test.sh": None}, "of-task", False),
    ("a step's: its own image", TASK_IMAGE + STEP + STEP_IMAGE, STEPS_DEFINITION, "of-step", False),
]  # fmt: skip


@pytest.mark.parametrize("case", IMAGES, ids=[case[0] for case in IMAGES])
def test_what_it_is_made_from(make_task: MakeTask, case: tuple[str, str, Files, str, bool]) -> None:
    _, toml, files, origin, uploads = case
    task = load_task(make_task(toml=toml, files={**STEP_FILES, **files}))
    (stage,) = task.stages
    spec = stage.verifier_spec
    assert spec is not None
    assert stage.brings_tests is not uploads
    assert spec.docker_image == origin or spec.context_dir == task.path / origin


def test_what_it_has_is_said_by_the_nearest_table(make_task: MakeTask) -> None:
    toml = """
    [environment]
    cpus = 1
    env = {A = "environment"}
    build_timeout_sec = 11
    [verifier.environment]
    cpus = 2
    build_timeout_sec = 22
    env = {A = "verifier"}
    [[steps]]
    name = "a"
    verifier.environment = {cpus = 3, workdir = "/srv"}
    verifier.user = 7
    [[steps]]
    name = "b"
    """
    task = load_task(make_task(toml=toml, files={**STEP_FILES, "steps/b/instruction.md": ""}))
    own, shared = (stage.verifier_spec for stage in task.stages)
    assert own is not None
    assert shared is not None
    assert (own.cpus, own.env, own.workdir, own.users, own.start_timeout_sec) == (3, {}, "/srv", {7}, 11)
    assert (shared.cpus, shared.env, shared.workdir, shared.users) == (2, {"A": "verifier"}, None, frozenset())
    assert task.container_spec.users == frozenset()


NONE = "network_mode = 'no-network'\n"


@pytest.mark.parametrize(
    ("toml", "start", "tests"),
    [
        (f"[environment]\n{NONE}[verifier]\n{SEPARATE}", NO_NETWORK, NO_NETWORK),
        (f"[environment]\n{NONE}[verifier.environment]", PUBLIC, PUBLIC),
        (f"[verifier]\n{NONE}[verifier.environment]", PUBLIC, NO_NETWORK),
        (f"[verifier.environment]\n{NONE}{STEP}verifier.network_mode = 'public'", NO_NETWORK, PUBLIC),
    ],
)
def test_its_network(make_task: MakeTask, toml: str, start: NetworkPolicy, tests: NetworkPolicy) -> None:
    (stage,) = load_task(make_task(toml=toml, files=STEP_FILES)).stages
    spec = stage.verifier_spec
    assert spec is not None
    assert (spec.network, stage.verifier_network, spec.networks) == (start, tests, {start, tests})


async def verified(task: HarborTask, folder: Path, *, factory: object = None) -> float:
    """What the tests say of an agent that did nothing."""
    make = factory or LocalContainerFactory()
    (stage,) = task.stages
    async with make(task.container_spec) as box:  # type: ignore[operator]
        await task.set_up(box)
        await stage.collect(box, folder)
    async with make(stage.verifier_spec) as box:  # type: ignore[operator]
        await stage.prepare_verifier(box, folder)
        return (await stage.verify(box, None)).reward


@pytest.mark.docker
@pytest.mark.once
async def test_files_beside_a_prebuilt_image_go_there_too(make_task: MakeTask, tmp_path: Path) -> None:
    from ares_exp.containers.docker import DockerContainerFactory

    toml = f"[environment]\ndocker_image = 'debian:bookworm-slim'\n[verifier]\n{SEPARATE}"
    toml += "[verifier.environment]\nworkdir = '/srv'\n"
    files = {
        "environment/Dockerfile": None,
        "environment/data/x": "7\n",
        "tests/test.sh": "#!/bin/bash\ncp /srv/data/x /logs/verifier/reward.txt\n",
    }
    task = load_task(make_task(toml=toml, files=files))
    assert await verified(task, tmp_path / "out", factory=DockerContainerFactory()) == 7
