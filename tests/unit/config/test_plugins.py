"""What counts as a plugin, and what becomes of one that does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.options import find_options, installed_plugins, option_problems
from ares_exp.config.targets import instantiate_group
from tests.installed_package import Site

OPTION = {"fine/conf/env/fine.yaml": "# Fine\n_target_: fine.Source\n"}


def test_a_plugin_is_found_without_being_imported(site: Site, tmp_path: Path) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION | {"fine/__init__.py": "raise RuntimeError('imported')\n"})
    found = installed_plugins()
    [plugin] = found.plugins
    assert (plugin.name, plugin.package) == ("fine", "fine 1.0")
    assert plugin.folder == tmp_path / "site" / "fine" / "conf"
    assert found.problems == ()
    assert "fine" not in sys.modules
    [option] = [one for one in find_options("env") if one.name == "fine"]
    assert (option.description, option.origin) == ("Fine", "plugin fine")


@pytest.mark.parametrize(
    ("value", "files", "reason"),
    [
        ("nowhere.conf", {}, "expected `nowhere.conf` to be a folder"),
        ("bad", {"bad.py": ""}, "expected `bad` to be a folder"),
        ("bad.conf:tree", {}, "expected the dotted name of a folder"),
        ("bad.conf", {"bad/conf/README": ""}, "expected an option in"),
        ("bad.conf", {"bad/conf/env/x.yaml": "", "bad/conf/config.yaml": ""}, "found config.yaml"),
        ("bad.conf", {"bad/conf/env/x.yaml": "", "bad/conf/hydra/launcher/basic.yaml": ""}, "found hydra/"),
    ],
)
def test_a_broken_plugin_is_named_and_left_out(site: Site, value: str, files: dict[str, str], reason: str) -> None:
    site.install("bad", {"broken": value}, files)
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    found = installed_plugins()
    assert [plugin.name for plugin in found.plugins] == ["fine"]
    [problem] = found.problems
    assert problem.startswith("The plugin `broken` of bad 1.0 is left out: ")
    assert reason in problem


def test_an_own_option_is_never_replaced(site: Site) -> None:
    files = {"fine/conf/env/harbor.yaml": "# Theirs\n_target_: fine.Source\n"}
    site.install("fine", {"fine": "fine.conf"}, OPTION | files)
    [problem] = option_problems()
    assert "`env=harbor` of the plugin `fine` is ignored: ares_exp itself has" in problem
    [option] = [one for one in find_options("env") if one.name == "harbor"]
    assert option.origin == "built in"
    assert compose_config(["env=harbor"]).env._target_ == "ares_exp.environments.harbor.HarborEnvironments"


def test_of_two_plugins_with_an_option_the_first_has_it(site: Site) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    site.install("later", {"later": "later.conf"}, {"later/conf/env/fine.yaml": "_target_: later.Source\n"})
    [problem] = option_problems()
    assert "`env=fine` of the plugin `later`" in problem
    assert "the plugin `fine`" in problem
    assert compose_config(["env=fine"]).env._target_ == "fine.Source"


def test_of_two_plugins_with_a_name_the_first_counts(site: Site) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    site.install("twin", {"fine": "twin.conf"}, {"twin/conf/env/twin.yaml": "_target_: twin.Source\n"})
    found = installed_plugins()
    assert [plugin.package for plugin in found.plugins] == ["fine 1.0"]
    assert "`fine` of twin 1.0 is left out: fine 1.0 has a plugin of that name" in found.problems[0]


def test_an_option_that_is_no_text_is_listed_without_a_description(site: Site, tmp_path: Path) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    (tmp_path / "site" / "fine" / "conf" / "env" / "odd.yaml").write_bytes(b"\xff\xfe\x00")
    [option] = [one for one in find_options("env") if one.name == "odd"]
    assert option.description == ""


@pytest.mark.usefixtures("nim")
def test_an_option_of_a_plugin_is_composed_and_made() -> None:
    source = instantiate_group(compose_config(["env=nim", "env.matches=[4]"]), "env")
    assert source.load(print) == ["nim_4"]
