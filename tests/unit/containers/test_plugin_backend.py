"""A container backend of a plugin is known wherever backends are known by their names."""

import json
from pathlib import Path

import pytest

from ares_exp.commands import clean
from ares_exp.commands.cli.run_command import run_command
from ares_exp.config.targets import find_part, option_targets
from ares_exp.runs.resume.session import collect_provenance
from ares_exp.wrappers.preset_gym import container_factory
from tests.installed_package import Site
from tests.unit.commands.harbor_export.recorded_run import record, tried

MODULE = """
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.containers.ownership import Leftover
from ares_exp.errors import ContainerServiceError

class MoonFactory(ContainerFactoryBase):
    name = "moon"
    harbor_name = "modal"

    def __call__(self, spec): ...
    async def preflight(self): ...
    def check(self, spec): return []

    @classmethod
    def find_leftovers(cls, *, images=False, snapshots=False):
        yield Leftover("crater", "c1", "run X", is_stale=True, created=None, remove=lambda: "")
        if images:
            raise ContainerServiceError("The moon does not answer.")
"""


@pytest.fixture(autouse=True)
def moon(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin, alone on this machine."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    monkeypatch.setattr(clean, "find_short_lived", list)
    files = {
        "moonbase/__init__.py": "from moonbase.factory import MoonFactory\n",
        "moonbase/factory.py": MODULE,
        "moonbase/conf/container/moon.yaml": "# The moon\n_target_: moonbase.MoonFactory\n",
        "moonbase/conf/container/mars.yaml": "# Not there\n_target_: moonbase.MarsFactory\n",
    }
    site.install("moonbase", {"moon": "moonbase.conf"}, files)


def test_backend_is_found_by_option_and_class() -> None:
    assert option_targets("container")["moon"] == "moonbase.MoonFactory"
    assert find_part("container", "moonbase.MoonFactory") is find_part("container", "moonbase.factory.MoonFactory")
    assert find_part("container", "moonbase.factory.ContainerFactoryBase") is None, "no option is made from it"
    assert find_part("container", "os.system") is None


def test_clean_lists_leftovers_of_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("clean", [], "ares-exp clean") == 0
    said = capsys.readouterr().out
    assert "crater         c1  of run X\n" in said
    assert "Mars was not checked for leftovers. `moonbase.MarsFactory` cannot be imported: the module" in said
    assert run_command("clean", ["--images"], "ares-exp clean") == 1
    said = capsys.readouterr().out
    assert "The moon does not answer.\n" in said
    assert "crater" in said, "what was found before counts"


def test_gymnasium_wrappers_accept_the_backend_name() -> None:
    assert container_factory("moon").name == "moon"
    with pytest.raises(ValueError, match=r"'docker', .*'moon' or a container factory, got 'sun'"):
        container_factory("sun")


def test_export_contains_the_harbor_name(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [tried()], config={"container": {"_target_": "moonbase.MoonFactory"}})
    words = [str(run), str(tmp_path / "job"), "--to", "harbor"]
    assert run_command("export", words, "ares-exp export") == 0
    config = json.loads((tmp_path / "job" / "config.json").read_text())
    assert config["environment"]["type"] == "modal"


def test_provenance_contains_the_package_version() -> None:
    packages = collect_provenance()["packages"]
    assert packages["moonbase"] == "1.0"
    assert packages["docker"] is not None
    assert "pytest" not in packages
