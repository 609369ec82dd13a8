"""What is said of a command line that does not compose."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.explain import explain


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
    said = explain(OSError(28, "No space left on device"), ["seed=1", "hydra.run.dir=small/r"])
    assert said.startswith("Cannot write a run to small/r: No space left on device. Choose another place")
