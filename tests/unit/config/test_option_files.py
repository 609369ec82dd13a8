"""Options of the user's own: what a file leaves out, and what it says of the rest."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ares_exp.commands.cli.help import render_help
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.option_files import OptionFiles
from ares_exp.config.options import folder_url
from ares_exp.config.targets import constructor_defaults, instantiate_group
from ares_exp.errors import ConfigError
from ares_exp.policies.chat_completions import OpenAIPolicy


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


def test_what_a_file_leaves_out_is_as_the_constructor_has_it(write: Callable[[str], Path]) -> None:
    folder = write(f"# Mine\n_target_: {TARGET}\nname: ${{policy.mode}}\nmine: 1\n")
    policy = compose_config(["policy=mine", "policy.depth=2", "policy.part.size=4"], config_dirs=[folder]).policy
    expected = {"depth": 2, "name": "fast", "mode": "fast", "words": ["a"], "part": {"size": 4}, "mine": 1}
    assert dict(policy) == {"_target_": TARGET, **expected}
    assert next(iter(policy)) == "_target_"


def test_what_has_no_default_has_to_be_given(write: Callable[[str], Path]) -> None:
    config = compose_config(["policy=mine"], config_dirs=[write(f"_target_: {TARGET}\ndepth: ???\n")])
    with pytest.raises(ConfigError, match=r"`policy\.(name|depth)` is required and has no default\. Set `policy\."):
        instantiate_group(config, "policy")
    config = compose_config(["policy=mine", "policy.name=x"], config_dirs=[write(f"_target_: {TARGET}\ndepth: ???\n")])
    with pytest.raises(ConfigError, match=r"`policy\.depth` is required"):
        instantiate_group(config, "policy")


@pytest.mark.parametrize(
    "text", ["_target_: no.such.Class\na: 1\n", "_target_: TARGET\n_partial_: true\na: 1\n", "a: 1\n"]
)
def test_other_files_are_taken_as_they_are(write: Callable[[str], Path], text: str) -> None:
    policy = compose_config(["policy=mine"], config_dirs=[write(text.replace("TARGET", TARGET))]).policy
    assert {key: value for key, value in policy.items() if not str(key).startswith("_")} == {"a": 1}


def test_an_agent_that_is_made_for_each_episode_has_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_default_that_no_config_can_hold_is_left_out() -> None:
    expected = {"depth": 1, "name": "???", "mode": "fast", "words": ["a"], "part": {"size": 3}}
    assert constructor_defaults(TARGET) == expected


def test_help_shows_what_can_be_set_of_an_option(write: Callable[[str], Path]) -> None:
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


def test_a_policy_of_an_endpoint_adds_options_to_those_that_it_inherits() -> None:
    inherited = constructor_defaults(f"{OpenAIPolicy.__module__}.{OpenAIPolicy.__qualname__}")
    assert constructor_defaults(f"{__name__}.PatientPolicy") == {**inherited, "patience_sec": 3.0}
    assert PatientPolicy(model="m", patience_sec=4, temperature=0).patience_sec == 4.0
    with pytest.raises(pydantic.ValidationError, match=r"patience\b"):
        PatientPolicy(model="m", patience=4)  # type: ignore[call-arg]


def test_a_file_of_the_package_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is had of it is the caller's own."""
    monkeypatch.setattr("ares_exp.config.option_files.conf_dir", lambda: tmp_path)
    file = tmp_path / "policy" / "mine.yaml"
    file.parent.mkdir()
    files = OptionFiles(provider="main", path=folder_url(tmp_path))
    found = []
    for text in ("# @package _global_\nreplies: [a]\n", "replies: [a, b]\n"):
        file.write_text(text)
        for _ in range(2):
            read = files.load_config("policy/mine.yaml")
            assert read.config is not None
            found.append((list(read.config["replies"]), read.header["package"]))
            read.config["replies"] = []
    assert found == [(["a"], "_global_"), (["a"], "_global_"), (["a", "b"], None), (["a", "b"], None)]
