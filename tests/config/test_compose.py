"""Every option of every group composes, and its arguments bind to the constructor behind it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import OmegaConf

from ares_exp.conf_dir import conf_dir
from ares_exp.config import GROUPS, ExperimentConfig, instantiate_group, instantiate_several, keys
from ares_exp.errors import ConfigError

OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((conf_dir() / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _schema() -> None:
    ConfigStore.instance().store(name="ares_exp_schema", node=ExperimentConfig, provider="ares_exp")


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_binds(group: str, option: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        node = compose("config", overrides=[f"{group}={option}"])[group]
    node = node.get(option, node)  # of some groups several options can be chosen: each has a node of its own
    arguments = {str(key) for key in node if not str(key).startswith("_")}
    parameters = inspect.signature(get_object(node["_target_"])).parameters
    open_ended = {name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
    assert arguments <= set(parameters), "an argument that the constructor does not take"
    documented = set(parameters) - open_ended - {"clock"}
    assert documented <= arguments, "an argument that the option does not show"


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "policy"])
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
    assert set(config) == {*GROUPS, *(item.name for item in keys())}


@pytest.mark.parametrize(
    "path", sorted(conf_dir().glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_an_option_opens_with_its_description(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "@package" not in line]
    assert lines[0].startswith("# ")
    assert len(lines[0]) < 140


def test_every_key_has_prose_and_a_default_of_its_type() -> None:
    defaults = OmegaConf.structured(ExperimentConfig)
    for item in keys():
        assert item.metadata["prose"]
        assert item.name in defaults
