import importlib
import pkgutil
import subprocess
import sys

import pytest

import ares_exp
import ares_exp.trajectories
from ares_exp.commands.cli.run_command import COMMANDS

SURFACE = {
    "CodeEnvironment",
    "DaytonaContainerFactory",
    "DockerContainerFactory",
    "Environment",
    "EnvironmentInfo",
    "EnvironmentSnapshot",
    "EpisodeLimits",
    "EpisodeTrajectory",
    "FinishedEpisode",
    "JsonTrajectoryCollector",
    "LLMRequest",
    "LLMResponse",
    "LocalContainerFactory",
    "NullTrajectoryCollector",
    "RunResults",
    "ShellAgentFactory",
    "TimeStep",
    "TrajectoryCollectingEnvironment",
    "arun",
    "driven",
    "info",
    "list_presets",
    "load_task",
    "make",
    "register_env",
    "register_preset",
    "rollouts",
    "run",
    "run_episode",
    "serialize_llm_request",
    "serialize_llm_response",
    "wrap_as_gym",
}
HEAVY = {"wandb", "docker", "daytona", "openai", "gymnasium", "numpy", "jinja2", "backports.zstd"}


def test_public_names_are_fixed_and_resolve() -> None:
    assert ares_exp.__all__ == sorted(SURFACE)
    for name in SURFACE:
        assert getattr(ares_exp, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ares_exp.nothing  # noqa: B018


def test_names_of_trajectories_resolve() -> None:
    for name in ares_exp.trajectories.__all__:
        assert getattr(ares_exp.trajectories, name).__doc__
    assert ares_exp.trajectories.NullTrajectoryCollector is ares_exp.NullTrajectoryCollector
    assert ares_exp.trajectories.serialize_llm_request is ares_exp.serialize_llm_request


def test_every_module_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # programs for containers read theirs
    modules = [module.name for module in pkgutil.walk_packages(ares_exp.__path__, "ares_exp.")]
    assert len(modules) > 300
    for name in modules:
        if not name.endswith("__main__"):  # which runs a command
            importlib.import_module(name)


@pytest.mark.parametrize(
    "module", ["ares_exp", "ares_exp.commands.cli.main", "ares_exp.commands.cli.hydra_run", "ares_exp.containers.local"]
)
def test_imports_are_lightweight(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_commands_are_imported_without_hydra() -> None:
    modules = ", ".join(f"ares_exp.commands.{name}" for name in COMMANDS)
    code = f"import sys, {modules}; print({{'hydra', 'omegaconf'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
