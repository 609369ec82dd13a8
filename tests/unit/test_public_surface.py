import subprocess
import sys

import pytest

import ares_exp

SURFACE = {
    "CodeEnvironment",
    "DaytonaContainerFactory",
    "DockerContainerFactory",
    "Environment",
    "EnvironmentInfo",
    "EnvironmentSnapshot",
    "EpisodeLimits",
    "EpisodeTrajectory",
    "JsonTrajectoryCollector",
    "LLMRequest",
    "LLMResponse",
    "LocalContainerFactory",
    "ShellAgentFactory",
    "TimeStep",
    "TrajectoryCollectingEnvironment",
    "info",
    "list_presets",
    "load_task",
    "make",
    "register_env",
    "register_preset",
    "run_episode",
    "wrap_as_gym",
}
HEAVY = {"wandb", "docker", "daytona", "openai", "gymnasium", "numpy", "jinja2", "zstandard"}


def test_the_public_names_are_these_and_all_resolve() -> None:
    assert ares_exp.__all__ == sorted(SURFACE)
    for name in SURFACE:
        assert getattr(ares_exp, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ares_exp.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["ares_exp", "ares_exp.cli.main", "ares_exp.cli.job", "ares_exp.containers.local"])
def test_importing_touches_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
