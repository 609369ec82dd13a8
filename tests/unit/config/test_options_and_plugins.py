import enum
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ares_exp.commands.cli.help import print_help, render_help
from ares_exp.commands.cli.run_command import run_command
from ares_exp.config import options
from ares_exp.config.hydra_setup import OptionFiles, compose_config, set_up_hydra
from ares_exp.config.targets import constructor_defaults, instantiate_group, option_defaults
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.twenty_questions import TwentyQuestionsEnvironments
from ares_exp.errors import ConfigError
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.records.run_dir import MAX_YAML_BYTES
from ares_exp.wrappers.registry import ConfiguredPreset, make
from tests.installed_package import Site

MODEL = ("policy@env.oracle=openai", "env.oracle.model=m")


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(options.conf_dir()), version_base="1.3"):
        return compose("config", overrides=["env=twenty_questions", *overrides])


def test_agent_instead_of_its_factory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lone_agent.py").write_text("class Lone:\n    def __init__(self, container, llm_client, n=1): ...\n")
    agent = option_defaults("agent", "lone_agent.Lone") | {"_target_": "lone_agent.Lone"}
    with pytest.raises(ConfigError, match=r"got lone_agent\.Lone, which is an agent:.* `_partial_: true`"):
        instantiate_group(OmegaConf.create({"agent": agent}), "agent")
    made = instantiate_group(OmegaConf.create({"agent": {"_target_": "lone_agent.Lone", "_partial_": True}}), "agent")
    assert type(made(container=None, llm_client=None)).__name__ == "Lone"
    with pytest.raises(ConfigError, match=r"`agent` has no argument `foo`: it takes .*`n`"):
        instantiate_group(
            OmegaConf.create({"agent": {"_target_": "lone_agent.Lone", "_partial_": True, "foo": 1}}), "agent"
        )


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_place.Part", rf"no module `no_such_place` for `no_such_place\.Part` in {Path.cwd()}"),
        ("ares_exp.agents.shell_agent.ShellAgentFactry", "has no `ShellAgentFactry`. Did you mean `ShellAgentFactory`"),
    ],
)
def test_missing_class_is_explained(target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"`agent` cannot be created: .*{says}"):
        instantiate_group(OmegaConf.create({"agent": {"_target_": target}}), "agent")


@pytest.mark.parametrize("overrides", [(), MODEL, ("policy@env.oracle=scripted", "env.oracle.replies=[yes]")])
def test_oracle_is_created_with_its_environment(overrides: tuple[str, ...]) -> None:
    config = composed(*overrides)
    assert isinstance(instantiate_group(config, "env"), TwentyQuestionsEnvironments)
    assert "OraclePolicy" in config.policy._target_, "the policy itself stays what it was"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*MODEL, "env.oracle.temperature=-1"), "`env.oracle.temperature`: .* -p env.oracle`"),
        ((*MODEL, "+env.oracle.temprature=1"), "`env.oracle` has no argument `temprature`.* mean `temperature`"),
        ((*MODEL, "+env.question=1"), "`env` has no argument `question`.* mean `questions`"),
        (("env.questions=0",), "`env.questions`"),
    ],
)
def test_mistake_is_reported_with_its_position(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        instantiate_group(composed(*overrides), "env")


class Mode(enum.StrEnum):
    FAST = "fast"


@dataclass(frozen=True)
class Part:
    size: int = 3


PART = Part()


class Policy:
    """Responses."""

    def __init__(
        self,
        depth: int = 1,
        *,
        name: str,
        mode: Mode = Mode.FAST,
        words: tuple[str, ...] = ("a",),
        part: Part = PART,
        clock: Callable[[], float] = time.time,
        **more: Any,
    ) -> None:
        """Answers.

        Args:
            depth: How deep; `None` is not.
            name: Its name.
        """


TARGET = f"{Policy.__module__}.Policy"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "policy").mkdir(exist_ok=True)
        (tmp_path / "policy" / "mine.yaml").write_text(text)
        return tmp_path

    return write


def test_omitted_keys_have_the_constructor_defaults(write: Callable[[str], Path]) -> None:
    folder = write(f"# Mine\n_target_: {TARGET}\nname: ${{policy.mode}}\nmine: 1\n")
    policy = compose_config(["policy=mine", "policy.depth=2", "policy.part.size=4"], config_dirs=[folder]).policy
    expected = {"depth": 2, "name": "fast", "mode": "fast", "words": ["a"], "part": {"size": 4}, "mine": 1}
    assert dict(policy) == {"_target_": TARGET, **expected}
    assert next(iter(policy)) == "_target_"


def test_value_without_a_default_is_required(write: Callable[[str], Path]) -> None:
    config = compose_config(["policy=mine"], config_dirs=[write(f"_target_: {TARGET}\ndepth: ???\n")])
    with pytest.raises(ConfigError, match=r"`policy\.(name|depth)` is required and has no default\. Set `policy\."):
        instantiate_group(config, "policy")
    config = compose_config(["policy=mine", "policy.name=x"], config_dirs=[write(f"_target_: {TARGET}\ndepth: ???\n")])
    with pytest.raises(ConfigError, match=r"`policy\.depth` is required"):
        instantiate_group(config, "policy")


@pytest.mark.parametrize(
    "text", ["_target_: no.such.Class\na: 1\n", "_target_: TARGET\n_partial_: true\na: 1\n", "a: 1\n"]
)
def test_files_without_a_target_are_unchanged(write: Callable[[str], Path], text: str) -> None:
    policy = compose_config(["policy=mine"], config_dirs=[write(text.replace("TARGET", TARGET))]).policy
    assert {key: value for key, value in policy.items() if not str(key).startswith("_")} == {"a": 1}


def test_partial_agent_has_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = 'class Patient:\n    """Waits.\n\n    Args:\n        looks: How often it looks.\n    """\n\n'
    code += "    def __init__(self, container, llm_client, *, looks=1, commands=5): ...\n"
    (tmp_path / "patient_agent.py").write_text(code)
    (tmp_path / "agent").mkdir()
    option = "# file: agent/patient.yaml\n# Waits\n_target_: patient_agent.Patient\n_partial_: true\nlooks: 2\n"
    (tmp_path / "agent" / "patient.yaml").write_text(option)
    agent = compose_config(["agent=patient", "agent.commands=3"], config_dirs=[tmp_path]).agent
    assert {key: value for key, value in agent.items() if not key.startswith("_")} == {"looks": 2, "commands": 3}
    text = render_help(["--help", "--config-dir", str(tmp_path), "agent=patient"], "ares-exp")
    assert text.startswith("agent=patient  Waits\n")
    assert "  agent.looks=2\n" in text
    assert "  agent.commands=5\n" in text
    assert "llm_client" not in text


def test_unrepresentable_default_is_omitted() -> None:
    expected = {"depth": 1, "name": "???", "mode": "fast", "words": ["a"], "part": {"size": 3}}
    assert constructor_defaults(TARGET) == expected


def test_help_shows_the_keys_of_an_option(write: Callable[[str], Path]) -> None:
    folder = write(f"# Mine\n_target_: {TARGET}\nname: x  # what it is called\n")
    text = render_help(["--help", "--config-dir", str(folder), "policy=mine"], "ares-exp")
    assert text.startswith(f"policy=mine  Mine\n  from {folder / 'policy' / 'mine.yaml'}\n")
    assert "  policy.depth=1\n      How deep; `null` is not.\n" in text
    assert "  policy.name=x\n      what it is called\n" in text
    both = render_help(["--help", "policy=oracle", "snapshot=every_n"], "ares-exp")
    assert "policy=oracle" in both
    assert "  snapshot.every=5\n" in both


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PatientPolicy(OpenAIPolicy):
    """An endpoint with an option more."""

    patience_sec: float = 3.0


def test_endpoint_policy_inherits_options() -> None:
    inherited = constructor_defaults(f"{OpenAIPolicy.__module__}.{OpenAIPolicy.__qualname__}")
    assert constructor_defaults(f"{__name__}.PatientPolicy") == {**inherited, "patience_sec": 3.0}
    assert PatientPolicy(model="m", patience_sec=4, temperature=0).patience_sec == 4.0
    with pytest.raises(pydantic.ValidationError, match=r"patience\b"):
        PatientPolicy(model="m", patience=4)  # type: ignore[call-arg]


def test_option_file_is_reread_after_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is had of it is the caller's own."""
    monkeypatch.setattr("ares_exp.config.hydra_setup.conf_dir", lambda: tmp_path)
    file = tmp_path / "policy" / "mine.yaml"
    file.parent.mkdir()
    files = OptionFiles(provider="main", path=options.folder_url(tmp_path))
    found = []
    for text in ("# @package _global_\nreplies: [a]\n", "replies: [a, b]\n"):
        file.write_text(text)
        for _ in range(2):
            read = files.load_config("policy/mine.yaml")
            found.append((list(read.config["replies"]), read.header["package"]))
            read.config["replies"] = []
    assert found == [(["a"], "_global_"), (["a"], "_global_"), (["a", "b"], None), (["a", "b"], None)]


main = partial(run_command, "list", program="ares-exp list")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "options"
    for option, text in {"env/harbor": "# Mine\n_target_: mine.Source\n", "policy/mine": "_target_: x.y\n"}.items():
        path = folder / f"{option}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def test_built_in_option_precedes_directory_with_a_warning(folder: Path) -> None:
    [problem] = options.option_problems([folder])
    assert f"`env=harbor` of {folder} is ignored: ares_exp itself has an option of that name" in problem
    assert f"Rename {folder / 'env' / 'harbor.yaml'}." in problem
    composed = compose_config(["env=harbor"], config_dirs=[folder])
    assert composed.env._target_ == "ares_exp.environments.harbor.HarborEnvironments"
    [listed] = [one for one in options.find_options("env", [folder]) if one.name == "harbor"]
    assert listed.origin == "built in"


def test_plugin_precedes_a_directory(site: Site, folder: Path) -> None:
    site.install("fine", {"fine": "fine.conf"}, {"fine/conf/policy/mine.yaml": "_target_: fine.Policy\n"})
    problem = options.option_problems([folder])[1]
    assert f"`policy=mine` of {folder} is ignored: the plugin `fine` has an option of that name" in problem
    assert compose_config(["policy=mine"], config_dirs=[folder]).policy._target_ == "fine.Policy"


def test_ignored_files_of_a_copy_are_reported(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(options.conf_dir(), copy)
    assert options.option_problems([options.conf_dir(), copy]) == []
    with (copy / "policy" / "oracle.yaml").open("a") as file:
        file.write("# changed\n")
    with (copy / "config.yaml").open("a") as file:
        file.write("attempts: 3\n")
    option, root = options.option_problems([copy])
    assert f"Rename {copy / 'policy' / 'oracle.yaml'}." in option
    assert root.startswith(f"{copy / 'config.yaml'} is ignored: ")
    assert f"{copy / 'experiment'}/NAME.yaml" in root


@pytest.mark.parametrize("written", [["--config-dir", "a"], ["--config-dir=a"], ["-m", "-cd", "a", "seed=1"]])
def test_config_directories_are_found_on_command_line(written: list[str]) -> None:
    assert options.config_dirs_of(written) == [Path("a")]


def test_help_list_and_preset_show_the_warning(
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
        (b"_target_: caf\xe9\n", "is not valid UTF-8: it contains the byte 0xe9"),
        (b"\xff\xfea\x00:\x00 \x001\x00", "is not valid UTF-8: it contains the byte 0xff"),
        (b"a: 1\x00\n", "special characters are not allowed"),
        (b"a: [\n", "expected the node content"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"#" * (MAX_YAML_BYTES + 1), f"at most {MAX_YAML_BYTES:,} bytes, got {MAX_YAML_BYTES + 1:,}"),
    ],
)
def test_unreadable_file_is_named(folder: Path, content: bytes, reason: str) -> None:
    path = folder / "policy" / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        compose_config(["policy=mine"], config_dirs=[folder])
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_composition_is_cached_until_a_file_changes(folder: Path) -> None:
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


def test_repeated_preset_is_not_composed_again() -> None:
    make("harbor:0")
    OptionFiles.looked_at.clear()
    make("harbor:1")
    assert OptionFiles.looked_at == {}


def test_unreadable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine" / "policy").mkdir(parents=True)
    assert options.refuse_unreadable([tmp_path / "mine", tmp_path / "gone"]) is None
    tmp_path.chmod(0o755)
    (tmp_path / "mine" / "policy").chmod(0o000)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        refusal = options.refuse_unreadable([tmp_path / "mine"])
    finally:
        os.seteuid(user)
        (tmp_path / "mine" / "policy").chmod(0o755)
    assert refusal.endswith("(--config-dir): Permission denied.")


OPTION = {"fine/conf/env/fine.yaml": "# Fine\n_target_: fine.Source\n"}


def test_plugin_is_found_without_its_import(site: Site, tmp_path: Path) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION | {"fine/__init__.py": "raise RuntimeError('imported')\n"})
    found = options.installed_plugins()
    [plugin] = found.plugins
    assert (plugin.name, plugin.package) == ("fine", "fine 1.0")
    assert plugin.folder == tmp_path / "site" / "fine" / "conf"
    assert found.problems == ()
    assert "fine" not in sys.modules
    [option] = [one for one in options.find_options("env") if one.name == "fine"]
    assert (option.description, option.origin) == ("Fine", "plugin fine")


@pytest.mark.parametrize(
    ("value", "files", "reason"),
    [
        ("nowhere.conf", {}, "`nowhere.conf` is not a folder"),
        ("bad", {"bad.py": ""}, "`bad` is not a folder"),
        ("bad.conf:tree", {}, "must be the dotted name of a folder"),
        ("bad.conf", {"bad/conf/README": ""}, "contains no file with an option"),
        ("bad.conf", {"bad/conf/env/x.yaml": "", "bad/conf/config.yaml": ""}, "contains config.yaml"),
        ("bad.conf", {"bad/conf/env/x.yaml": "", "bad/conf/hydra/launcher/basic.yaml": ""}, "contains hydra/"),
    ],
)
def test_broken_plugin_is_named_and_skipped(site: Site, value: str, files: dict[str, str], reason: str) -> None:
    site.install("bad", {"broken": value}, files)
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    found = options.installed_plugins()
    assert [plugin.name for plugin in found.plugins] == ["fine"]
    [problem] = found.problems
    assert problem.startswith("The plugin `broken` of bad 1.0 is ignored: ")
    assert reason in problem


def test_plugin_cannot_replace_a_built_in_option(site: Site) -> None:
    files = {"fine/conf/env/harbor.yaml": "# Theirs\n_target_: fine.Source\n"}
    site.install("fine", {"fine": "fine.conf"}, OPTION | files)
    [problem] = options.option_problems()
    assert "`env=harbor` of the plugin `fine` is ignored: ares_exp itself has" in problem
    [option] = [one for one in options.find_options("env") if one.name == "harbor"]
    assert option.origin == "built in"
    assert compose_config(["env=harbor"]).env._target_ == "ares_exp.environments.harbor.HarborEnvironments"


def test_first_of_two_equal_plugin_options_is_used(site: Site) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    site.install("later", {"later": "later.conf"}, {"later/conf/env/fine.yaml": "_target_: later.Source\n"})
    [problem] = options.option_problems()
    assert "`env=fine` of the plugin `later`" in problem
    assert "the plugin `fine`" in problem
    assert compose_config(["env=fine"]).env._target_ == "fine.Source"


def test_first_of_two_equal_plugins_is_used(site: Site) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    site.install("twin", {"fine": "twin.conf"}, {"twin/conf/env/twin.yaml": "_target_: twin.Source\n"})
    found = options.installed_plugins()
    assert [plugin.package for plugin in found.plugins] == ["fine 1.0"]
    assert "`fine` of twin 1.0 is ignored: fine 1.0 already has a plugin with this name" in found.problems[0]


def test_binary_option_file_has_no_description(site: Site, tmp_path: Path) -> None:
    site.install("fine", {"fine": "fine.conf"}, OPTION)
    (tmp_path / "site" / "fine" / "conf" / "env" / "odd.yaml").write_bytes(b"\xff\xfe\x00")
    [option] = [one for one in options.find_options("env") if one.name == "odd"]
    assert option.description == ""
