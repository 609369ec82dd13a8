"""What is said of a command line that does not compose."""

from __future__ import annotations

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.explain import explain
from ares_exp.config.hydra_setup import set_up_hydra
from ares_exp.config.options import conf_dir


def test_a_place_that_cannot_be_written_is_named_with_the_remedy() -> None:
    def refuse() -> str:
        raise PermissionError(13, "Permission denied", "outputs")

    OmegaConf.register_new_resolver("refuse", refuse, replace=True)
    try:
        with pytest.raises(OmegaConfBaseException) as caught:
            _ = OmegaConf.create({"place": {"dir": "${inner}"}, "inner": "${refuse:}"}).place.dir
    finally:
        OmegaConf.clear_resolver("refuse")
    said = explain(caught.value, [])
    assert said.startswith("Cannot use outputs: Permission denied.")
    assert "hydra.run.dir=…" in said


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("seed=1,2", "Use `-m seed=1,2` to run a sweep."),
        ("name=a,b", "Use `-m name=a,b` to run a sweep, `'name=[a,b]'` for a list, or"),
    ],
)
def test_explain_names_uses_of_several_values(override: str, remedy: str) -> None:
    set_up_hydra()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"), pytest.raises(HydraException) as caught:
        GlobalHydra.instance().config_loader().load_configuration("config", [override], RunMode.RUN)
    assert remedy in explain(caught.value, [])
