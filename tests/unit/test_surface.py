"""The commands, groups and top-level keys that a user meets, and the length of `--help`: a new one replaces another."""

import pytest

from ares_exp.commands.cli.help import render_help
from ares_exp.commands.cli.run_command import COMMANDS, parser_of
from ares_exp.config.options import OPTION_GROUPS, conf_dir
from ares_exp.config.schema import KEYS

MAX_GROUPS, MAX_KEYS, MAX_COMMANDS, MAX_HELP_LINES = 11, 18, 15, 70
GROUPS = {
    "env": "ares harbor swebench terminal_bench twenty_questions",
    "agent": "aider claude_agent_sdk claude_code codex command copilot gemini_cli harbor kimi_code mini_swe_agent "
    "opencode openhands pi qwen_code shell terminal tools",
    "container": "daytona docker host local podman",
    "policy": "anthropic noop openai openai_responses oracle replay scripted sglang transformers vllm",
    "wrapper": "async none sync",
    "collector": "json jsonl memory none",
    "tracker": "jsonl none tensorboard wandb",
    "snapshot": "every_n every_step manual none on_failure",
    "executor": "local ray",
    "scorer": "judge none",
    "experiment": "collect_sft none pass_at_k resume_demo smoke temperature_sweep",
}
SUBCOMMANDS = {
    "list": [],
    "task": ["new", "check", "shell"],
    "agents": ["list", "install", "remove", "pack"],
    "show": [],
    "compare": [],
    "view": [],
    "report": [],
    "export": [],
    "score": [],
    "ctl": [],
    "snapshots": ["list", "show", "verify", "gc"],
    "merge": [],
    "wandb": ["sync", "dashboard"],
    "clean": [],
    "serve": [],
}
"""In the order of the help; a run has no name."""


def test_groups_and_their_options_are_fixed() -> None:
    assert list(OPTION_GROUPS) == list(GROUPS)
    found = {group: " ".join(sorted(path.stem for path in (conf_dir() / group).glob("*"))) for group in GROUPS}
    assert found == GROUPS
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} == {*OPTION_GROUPS, "hydra"}
    assert len(GROUPS) <= MAX_GROUPS


def test_top_level_keys_are_fixed() -> None:
    expected = (
        *("name", "attempts", "concurrency", "seed", "objective", "reward_threshold", "verify_on_truncation"),
        *("limits", "timeouts", "budget", "retry", "resume", "resume_redo", "resume_force", "replay"),
        *("branch_from", "branches", "branch"),
    )
    assert expected == KEYS
    assert len(KEYS) <= MAX_KEYS


def test_help_fits_on_a_page() -> None:
    lines = render_help([], "python -m ares_exp").splitlines()
    assert len(lines) <= MAX_HELP_LINES
    assert max(map(len, lines)) <= 120
    text = " ".join(map(str.strip, lines))
    for group, options in GROUPS.items():
        assert f" {group:<10}  {', '.join(options.split())}" in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["policy"], "    openai_responses         "),
        (["env=harbor"], "  env.path=null\n"),
        (["limits"], "  limits.steps=250\n      maximum number of LLM responses per episode\n"),
        (["timeouts"], "  timeouts.agent_multiplier=null\n"),
        (["branch"], "  branch.response=null\n"),
        (["budget"], "  budget.sweep.cost=null\n"),
        (["retry"], "  retry.errors.RateLimitError=null\n"),
    ],
)
def test_help_describes_its_arguments(argv: list[str], said: str) -> None:
    text = render_help(["--help", *argv], "ares-exp")
    assert said in text
    assert "Usage:" not in text


def test_commands_are_fixed() -> None:
    commands = {name: [*parser_of(name, name).below] for name in COMMANDS}
    assert [*commands.items()] == [*SUBCOMMANDS.items()]
    assert len(commands) <= MAX_COMMANDS
