"""The local sandbox as an ordinary user: the same tests, run by `nobody`."""

import re
import subprocess

import pytest

from tests.unit.containers.local_containers import as_ordinary_user, needs_local

pytestmark = [needs_local, pytest.mark.root, pytest.mark.once, pytest.mark.timeout(600)]


def test_ordinary_user_can_create_boxes() -> None:
    run = as_ordinary_user("-c", _PREFLIGHT)
    if run.returncode == 3:
        pytest.skip(f"an ordinary user may not here: {run.stdout}")
    assert (run.stdout, run.returncode) == ("uid=0(root) gid=0(root) groups=0(root)\n", 0), run.stderr


_PREFLIGHT = """
import asyncio, os
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import PreflightError

async def main():
    assert os.getuid() == 65534
    factory = LocalContainerFactory()
    try:
        await factory.preflight()
    except PreflightError as error:
        print(error)
        raise SystemExit(3)
    async with factory(ContainerSpec(name="x")) as container:
        print((await container.exec("id")).output, end="")

asyncio.run(main())
"""


def as_nobody(names: str) -> subprocess.CompletedProcess[str]:
    files = [f"tests/unit/containers/test_local_{name}.py".replace("_.py", ".py") for name in names.split(",")]
    return as_ordinary_user("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *files, timeout=550)


@pytest.mark.parametrize(
    "names",
    [
        "escape",
        pytest.param(",contract,isolation,limits,lifetime,dockerfile,changes,relays", marks=pytest.mark.nightly),
    ],
)
def test_isolation_suite_passes_as_ordinary_user(names: str) -> None:
    run = as_nobody(names)
    if re.search(r"SKIPPED.*container=local is not to be had here", run.stdout):
        pytest.skip(f"an ordinary user may not make containers here: {run.stdout[-500:]}")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr
    assert re.search(r"\d+ passed", run.stdout), run.stdout + run.stderr
