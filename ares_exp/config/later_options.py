"""Options that came later than records that lack them: what stands for how their class behaved before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ares_exp.config.added_arguments import added_defaults

LATER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "ares_exp.agents.shell_agent.ShellAgentFactory": {
        "format_errors_in_a_row": None,
        "compaction": "none",
        "compaction_tokens": 100_000,
        "compaction_keeps": 5,
    },
    "ares_exp.agents.terminal_agent.TerminalAgentFactory": {"reply_form": "json"},
    "ares_exp.agents.installed.claude_code.ClaudeCodeFactory": {"side_calls": "observe"},
    "ares_exp.agents.installed.codex.CodexFactory": {"side_calls": "observe"},
    "ares_exp.agents.installed.command.CommandAgentFactory": {"side_calls": "observe"},
    "ares_exp.agents.installed.mini_swe_agent.MiniSweAgentFactory": {"side_calls": "observe"},
    "ares_exp.agents.installed.opencode.OpencodeFactory": {"side_calls": "observe"},
    "ares_exp.agents.installed.qwen_code.QwenCodeFactory": {"side_calls": "observe"},
    "ares_exp.containers.daytona.factory.DaytonaContainerFactory": {"door_lease_sec": 2},
}
"""By class: an option, and the value with which it does what the class did without it."""

LATER_GROUPS: Mapping[str, Mapping[str, Any]] = {"trainer": {"_target_": "ares_exp.running.trainer.NoTrainer"}}
"""Groups of the root config, with what stands for how runs were played without them."""


def with_later_options(config: Any) -> Any:
    """Returns a copy of a recorded config with the options and groups that came later."""
    if isinstance(config, dict):
        if isinstance(env := config.get("env"), dict) and "_target_" in env:
            config = {**LATER_GROUPS, **config, "env": {**added_defaults("env"), **env}}
        later = LATER_OPTIONS.get(str(config.get("_target_")), {})
        return {**{key: with_later_options(value) for key, value in config.items()}, **_lacking(config, later)}
    return [with_later_options(item) for item in config] if isinstance(config, list) else config


def options_of_record(target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recorded options of a class, with those that came later."""
    return {**options, **_lacking(options, LATER_OPTIONS.get(target, {}))}


def _lacking(options: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in later.items() if key not in options}
