"""A component inside of another one: `policy@env.oracle=…` puts any policy where the environment's oracle goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ares_exp.config.hydra_setup import set_up_hydra
from ares_exp.config.options import conf_dir
from ares_exp.config.targets import instantiate_group, option_defaults
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.errors import ConfigError

MODEL = ("policy@env.oracle=openai", "env.oracle.model=m")


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=["env=twenty_questions", *overrides])


def test_an_agent_in_the_place_of_its_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lone_agent.py").write_text("class Lone:\n    def __init__(self, container, llm_client, n=1): ...\n")
    agent = option_defaults("agent", "lone_agent.Lone") | {"_target_": "lone_agent.Lone"}
    with pytest.raises(ConfigError, match=r"got lone_agent\.Lone, which is an agent itself.* `_partial_: true`"):
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
        ("no_such_place.Part", rf"no module `no_such_place` for `no_such_place\.Part`\. Looked for in {Path.cwd()}"),
        ("ares_exp.agents.shell_agent.ShellAgentFactry", "has no `ShellAgentFactry`. Did you mean `ShellAgentFactory`"),
    ],
)
def test_a_class_that_is_not_there(target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"`agent` cannot be made: .*{says}"):
        instantiate_group(OmegaConf.create({"agent": {"_target_": target}}), "agent")


@pytest.mark.parametrize("overrides", [(), MODEL, ("policy@env.oracle=scripted", "env.oracle.replies=[yes]")])
def test_the_oracle_is_made_with_its_environment(overrides: tuple[str, ...]) -> None:
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
def test_a_mistake_is_told_where_it_is(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        instantiate_group(composed(*overrides), "env")
