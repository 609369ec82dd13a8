"""A component inside of another one: `policy@env.oracle=…` puts any policy where the environment's oracle goes."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ares_exp.config.hydra_setup import set_up_hydra
from ares_exp.config.instantiate import instantiate_group
from ares_exp.config.options import conf_dir
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.errors import ConfigError

MODEL = ("policy@env.oracle=chat_completions", "env.oracle.model=m")


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=["env=twenty_questions", *overrides])


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
