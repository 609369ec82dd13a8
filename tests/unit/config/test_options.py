"""Which options count, what is said of those that do not, and of files that are none."""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.commands.cli.help import print_help
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.option_files import OptionFiles
from ares_exp.config.options import conf_dir, config_dirs_of, find_options, option_problems, refuse_unreadable
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ConfigError
from ares_exp.records.record_files import MAX_YAML_BYTES
from ares_exp.wrappers.registry import ConfiguredPreset, make
from tests.installed_package import Site

main = partial(COMMANDS["list"].main, program="ares-exp list")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of options, one of which has a name that is taken."""
    folder = tmp_path / "options"
    for option, text in {"env/harbor": "# Mine\n_target_: mine.Source\n", "policy/mine": "_target_: x.y\n"}.items():
        path = folder / f"{option}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def test_an_option_of_a_folder_never_takes_the_place_of_an_own_one_and_that_is_said(folder: Path) -> None:
    [problem] = option_problems([folder])
    assert f"`env=harbor` of {folder} is ignored: ares_exp itself has an option of that name" in problem
    assert f"Rename {folder / 'env' / 'harbor.yaml'}." in problem
    composed = compose_config(["env=harbor"], config_dirs=[folder])
    assert composed.env._target_ == "ares_exp.environments.harbor.HarborEnvironments"
    [listed] = [one for one in find_options("env", [folder]) if one.name == "harbor"]
    assert listed.origin == "built in"


def test_a_plugin_comes_before_a_folder(site: Site, folder: Path) -> None:
    site.install("fine", {"fine": "fine.conf"}, {"fine/conf/policy/mine.yaml": "_target_: fine.Policy\n"})
    problem = option_problems([folder])[1]
    assert f"`policy=mine` of {folder} is ignored: the plugin `fine` has an option of that name" in problem
    assert compose_config(["policy=mine"], config_dirs=[folder]).policy._target_ == "fine.Policy"


def test_of_a_copy_what_differs_is_said(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(conf_dir(), copy)
    assert option_problems([conf_dir(), copy]) == []
    with (copy / "policy" / "oracle.yaml").open("a") as file:
        file.write("# changed\n")
    with (copy / "config.yaml").open("a") as file:
        file.write("attempts: 3\n")
    option, root = option_problems([copy])
    assert f"Rename {copy / 'policy' / 'oracle.yaml'}." in option
    assert root.startswith(f"{copy / 'config.yaml'} is ignored: ")
    assert f"{copy / 'experiment'}/NAME.yaml" in root


@pytest.mark.parametrize("written", [["--config-dir", "a"], ["--config-dir=a"], ["-m", "-cd", "a", "seed=1"]])
def test_folders_on_a_command_line(written: list[str]) -> None:
    assert config_dirs_of(written) == [Path("a")]


def test_help_the_list_and_a_preset_say_it(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    print_help(["--help", "--config-dir", str(folder)], "ares-exp")
    assert "warning: `env=harbor` of " in capsys.readouterr().err
    assert main(["policies", "--config-dir", str(folder)]) == 0
    assert "warning: `env=harbor` of " in capsys.readouterr().err
    preset = ConfiguredPreset("harbor", config_dirs=(folder,))
    with caplog.at_level(logging.WARNING):
        preset.get_env(selector=list, container_factory=LocalContainerFactory())
    assert "`env=harbor` of " in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"_target_: caf\xe9\n", "to be in UTF-8, found the byte 0xe9"),
        (b"\xff\xfea\x00:\x00 \x001\x00", "to be in UTF-8, found the byte 0xff"),
        (b"a: 1\x00\n", "special characters are not allowed"),
        (b"a: [\n", "expected the node content"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"#" * (MAX_YAML_BYTES + 1), f"at most {MAX_YAML_BYTES:,} bytes, got {MAX_YAML_BYTES + 1:,}"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, content: bytes, reason: str) -> None:
    path = folder / "policy" / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        compose_config(["policy=mine"], config_dirs=[folder])
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_what_was_composed_is_kept_until_a_file_of_it_changes(folder: Path) -> None:
    option = folder / "policy" / "mine.yaml"
    option.write_text("_target_: x.y\ndepth: 1\n")
    first = compose_config(["policy=mine"], config_dirs=[folder])
    first.policy.depth = 7
    OptionFiles.looked_at.clear()
    assert compose_config(["policy=mine"], config_dirs=[folder]).policy.depth == 1, "each caller has its own"
    assert OptionFiles.looked_at == {}, "nothing was composed"
    assert compose_config(["policy=mine", "policy.depth=2"], config_dirs=[folder]).policy.depth == 2
    option.write_text("_target_: x.y\ndepth: 30\n")
    assert compose_config(["policy=mine"], config_dirs=[folder]).policy.depth == 30
    option.unlink()
    with pytest.raises(ConfigError, match="mine"):
        compose_config(["policy=mine"], config_dirs=[folder])


def test_making_a_preset_again_composes_nothing() -> None:
    make("harbor:0")
    OptionFiles.looked_at.clear()
    make("harbor:1")
    assert OptionFiles.looked_at == {}


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine" / "policy").mkdir(parents=True)
    assert refuse_unreadable([tmp_path / "mine", tmp_path / "gone"]) is None
    tmp_path.chmod(0o755)
    (tmp_path / "mine" / "policy").chmod(0o000)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        refusal = refuse_unreadable([tmp_path / "mine"])
    finally:
        os.seteuid(user)
        (tmp_path / "mine" / "policy").chmod(0o755)
    assert refusal is not None
    assert refusal.endswith("(--config-dir): Permission denied.")
