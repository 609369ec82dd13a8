"""The wheel that the sdist builds runs from any directory: it contains conf, samples and prompts."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import run_command

ROOT = Path(__file__).parent.parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

SAMPLE = """
import asyncio

import ares_exp


async def policy(request: ares_exp.LLMRequest) -> ares_exp.LLMResponse:
    return ares_exp.LLMResponse.from_text(str(request.messages[-1]["content"]))


async def execute(environment: ares_exp.Environment) -> float | None:
    async with environment:
        step = await environment.reset()
        while step.observation is not None:
            step = await environment.step(await policy(step.observation))
        return step.reward


def main() -> None:
    preset, *_ = ares_exp.list_presets()
    print(asyncio.run(execute(ares_exp.make(f"{preset}:0"))))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pack = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(pack, cwd=ROOT, check=True, timeout=100)
    [sdist] = folder.glob("ares_exp-*.tar.gz")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sdist)]
    subprocess.run(build, check=True, timeout=100)
    [built] = folder.glob("ares_exp-*.whl")
    return built


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    folder = tmp_path_factory.mktemp("target") / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), str(wheel)], check=True, timeout=100)
    return folder


@pytest.mark.local
def test_wheel_runs_jobs_and_commands(tmp_path: Path, wheel: Path, target: Path) -> None:
    assert wheel.stat().st_size < 2_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert not re.findall(r"\]\((?!https://)", metadata), "links and pictures that PyPI cannot show"
    assert "ares_exp/conf/config.yaml" in names
    assert "ares_exp/py.typed" in names
    assert "ares_exp/agents/templates/system.j2" in names
    assert "ares_exp/commands/task_template/environment/Dockerfile" in names
    assert not [name for name in names if name.startswith(("tests/", "outputs/"))]
    expected = {
        "-c 'import ares_exp; print(ares_exp.__file__)'": str(target),
        "-m ares_exp tracker=none env.limit=2": "mean reward 1.00 [0.34, 1.00] over 2 scored",
        "-m ares_exp --help": "Usage",
        "-m ares_exp list": "harbor",
        "-m ares_exp report latest": "report.html",
    }
    for arguments, printed in expected.items():
        done = run_command((sys.executable, *shlex.split(arguments)), tmp_path, {"PYTHONPATH": str(target)})
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_see_the_types_of_the_wheel(tmp_path: Path, target: Path, checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: it is in the extra `dev`")
    (tmp_path / "right.py").write_text(SAMPLE)
    (tmp_path / "wrong.py").write_text(SAMPLE.replace("-> float | None", "-> str"))
    if checker == "mypy":  # only our own
        options = ["--strict", "--follow-imports=silent", "--no-site-packages", "--cache-dir=/dev/null"]
        done = checked(tmp_path, ["mypy", *options, "right.py", "wrong.py"], MYPYPATH=str(target))
        errors = [line for line in done.splitlines() if " error: " in line]
        message = "Incompatible return value type"
    else:
        config = {"typeCheckingMode": "strict", "extraPaths": [str(target)], "include": ["right.py", "wrong.py"]}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
        found = json.loads(checked(tmp_path, ["pyright", "--outputjson", "--pythonpath", sys.executable]))
        errors = [f"{Path(one['file']).name}: {one['message']}" for one in found["generalDiagnostics"]]
        message = 'Type "float | None" is not assignable to return type "str"'
    assert [line.partition(":")[0] for line in errors] == ["wrong.py"], errors
    assert message in errors[0]


def checked(folder: Path, command: list[str], **variables: str) -> str:
    done = run_command((sys.executable, "-m", *command), folder, variables)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
