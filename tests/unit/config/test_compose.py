"""Every option of every group composes, and its arguments bind to the constructor behind it."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf

from ares_exp.config.hydra_setup import set_up_hydra
from ares_exp.config.option_arguments import arguments_of
from ares_exp.config.options import conf_dir, find_options
from ares_exp.config.overrides import dotted_items
from ares_exp.config.schema import GROUPS, KEYS, TRAINER, ExperimentConfig, keys, value_of
from ares_exp.config.targets import SCORER, added_defaults, constructor_defaults, instantiate_group, instantiate_several
from ares_exp.errors import ConfigError

MADE = [group for group in GROUPS if group != SCORER]
OPTIONS = [(group, path.stem) for group in MADE for path in sorted((conf_dir() / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


@functools.cache
def composed_round(number: int) -> Any:
    """Of every group the option of that number, or its last one: to compose takes as long for all groups as for one."""
    options = {group: [option for of, option in OPTIONS if of == group] for group in MADE}
    chosen = [f"{group}={names[min(number, len(names) - 1)]}" for group, names in options.items() if names]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=chosen)


def composed(group: str, option: str) -> Any:
    node = composed_round([name for of, name in OPTIONS if of == group].index(option))[group]
    return (
        node if "_target_" in node else node.get(option, node)
    )  # of some groups several options can be chosen: each has a node of its own


@pytest.mark.parametrize(
    ("option", "variable", "root", "path"),
    [
        ("openai", "OPENAI_BASE_URL", "http://127.0.0.1:8000/v1", ""),
        ("anthropic", "ANTHROPIC_BASE_URL", "http://127.0.0.1:8000", "/v1"),  # as the vendor's own clients read it
    ],
)
def test_the_endpoint_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, option: str, variable: str, root: str, path: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    default = inspect.signature(get_object(composed("policy", option)._target_)).parameters["base_url"]
    assert composed("policy", option).base_url == default.default
    monkeypatch.setenv(variable, root)  # asked for when it is read
    assert composed("policy", option).base_url == root + path


@pytest.mark.parametrize(
    ("chosen", "container"),
    [
        (["env=terminal_bench"], "docker"),
        (["env=swebench"], "docker"),
        (["container=podman", "env=swebench"], "podman"),
        (["env=harbor"], "local"),
    ],
)
def test_data_sets_of_images_choose_docker(chosen: list[str], container: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides=chosen)
    assert config.container._target_ == composed("container", container)._target_


@pytest.mark.parametrize(
    ("chosen", "name"), [(["policy=anthropic", "policy.model=m-1"], "m-1"), (["policy=anthropic"], None), ([], None)]
)
@pytest.mark.parametrize("agent", ["claude_code", "codex", "opencode", "qwen_code"])
def test_packaged_agents_are_told_the_policys_model(agent: str, chosen: list[str], name: str | None) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert compose("config", overrides=[f"agent={agent}", *chosen]).agent.model_name == name


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_with_every_argument_of_its_constructor(group: str, option: str) -> None:
    node = composed(group, option)
    arguments = {str(key) for key in node if not str(key).startswith("_")}
    parameters = inspect.signature(get_object(node["_target_"])).parameters.values()
    named = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    assert arguments == (set() if node.get("_partial_") else named - {"clock"}) | set(added_defaults(group))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_a_file_holds_only_what_differs_from_the_constructor(group: str, option: str) -> None:
    settings = yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
    defaults = constructor_defaults(composed(group, option)["_target_"])
    assert [key for key, value in settings.items() if key in defaults and value == defaults[key]] == []


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_argument_is_explained(group: str, option: str) -> None:
    [found] = [one for one in find_options(group) if one.name == option]
    arguments = arguments_of(found)
    assert [one.key for one in arguments if not one.prose] == []
    node = OmegaConf.to_container(composed(group, option), resolve=False)
    keys = [key for key, _ in dotted_items(node) if not key.startswith("_")]
    assert sorted(one.key.removeprefix(f"{group}.").removeprefix(f"{option}.") for one in arguments) == sorted(keys)


@pytest.mark.parametrize("group", [group for group in MADE if group != "policy"])
def test_an_option_that_makes_something_else_is_refused(group: str) -> None:
    config = OmegaConf.create({group: {"_target_": "builtins.int"}})
    for make in (instantiate_group, instantiate_several):
        with pytest.raises(ConfigError, match=f"Expected the option of `{group}` to make .*, got int, which has no `"):
            make(config, group)
    several = OmegaConf.create({group: {"one": {"_target_": "builtins.int"}}})
    with pytest.raises(ConfigError, match=f"Expected the option of `{group}` to make "):
        instantiate_several(several, group)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes(name: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides=[f"experiment={name}"])
    assert set(config) == {*GROUPS, TRAINER, *KEYS}


@pytest.mark.parametrize(
    "path", sorted(conf_dir().glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_an_option_opens_with_its_description(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "@package" not in line]
    assert lines[0].startswith("# ")
    assert len(lines[0]) < 140
    assert not lines[0].endswith(".")


def test_every_key_has_prose_and_a_default_of_its_type() -> None:
    defaults = OmegaConf.structured(ExperimentConfig)
    for key in keys():
        assert key.prose
        assert value_of(defaults, key.name) == key.default


def test_wrong_value_names_its_key_without_types() -> None:
    config = OmegaConf.merge({"policy": composed("policy", "scripted")}, {"policy": {"replies": "hello"}})
    with pytest.raises(ConfigError, match=r"^`policy\.replies`: Input should be a valid list or "):
        instantiate_group(config, "policy")
