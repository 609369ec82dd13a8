"""A third-party package, built and installed in a separate venv, adds an environment and a policy."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import rows, run_command
from tests.installed_package import python_with
from tests.warm_start import warm_command

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).parent / "ares_nim"
RUN = ("env=nim", "policy=nim_greedy", "tracker=none")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(PACKAGE, tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def run(python: Path, tmp_path: Path) -> Cli:
    """Runs `python -m …` of that venv in an empty directory."""

    def run(module: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return run_command((*warm_command(module, python=str(python)), *arguments), tmp_path, env)

    return run


def rewards(run_dir: Path) -> list[float]:
    return [row["reward"] for row in rows(run_dir)]


def test_plugin_options_are_listed(run: Cli) -> None:
    asked = [run("ares_exp", "--help", group) for group in ("env", "policy")]
    assert [one.stderr for one in asked] == ["", ""]
    text = "".join(one.stdout for one in asked)
    assert "    nim                      The game of Nim against a cautious player (plugin nim)\n" in text
    assert "    nim_greedy               Wins at Nim by taking what it can (plugin nim)\n" in text
    listed = json.loads(run("ares_exp", "list", "--json").stdout)
    [env] = [row for row in listed["envs"] if row["name"] == "nim"]
    assert (env["tasks"], env["from"]) == (3, "plugin nim")
    [policy] = [row for row in listed["policies"] if row["name"] == "nim_greedy"]
    assert policy["description"] == "Wins at Nim by taking what it can"
    assert listed["plugins"][0]["package"] == "ares-nim 1.0"
    tasks = json.loads(run("ares_exp", "list", "tasks", "env=nim", "env.matches=[7,8]", "--json").stdout)
    assert tasks == {"tasks": [{"index": None, "name": "nim_7"}, {"index": None, "name": "nim_8"}]}


def test_plugin_environment_and_policy_run(run: Cli, tmp_path: Path) -> None:
    done = run("ares_exp", *RUN, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert rewards(tmp_path / "run") == [1.0, 1.0, 1.0]
    lost = run("ares_exp", "env=nim", "policy=scripted", "policy.replies=['4']", "tracker=none", "hydra.run.dir=lost")
    assert lost.returncode == 0, lost.stderr
    assert rewards(tmp_path / "lost") == [0.0, 0.0, 0.0]


@pytest.mark.nightly
def test_sweep_processes_load_the_plugin(run: Cli, tmp_path: Path) -> None:
    swept = ("env.matches=[3],[6]", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep")
    done = run("ares_exp", "-m", *RUN, *swept)
    assert done.returncode == 0, done.stderr
    assert [rewards(tmp_path / "sweep" / job) for job in ("0", "1")] == [[1.0], [1.0]]


def test_plugin_config_is_composed(run: Cli) -> None:
    done = run("ares_exp", *RUN, "--cfg", "job", "-p", "env")
    assert done.returncode == 0, done.stderr
    assert "_target_: ares_nim.environment.NimEnvironments" in done.stdout
    refused = run("ares_exp", "env=nmi")
    assert refused.returncode == 2
    assert "Did you mean `nim`?" in refused.stderr


def test_tab_completes_plugin_options_without_other_output(run: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "options" / "policy"
    folder.mkdir(parents=True)
    (folder / "oracle.yaml").write_text("_target_: x.y\n")
    asked = {"COMP_LINE": "ares-exp env=ni", "COMP_POINT": "15"}
    done = run("ares_exp", "-sc", "--config-dir", "options", "query=bash", env=asked)
    assert (done.stdout.split(), done.stderr) == (["env=nim"], "")
