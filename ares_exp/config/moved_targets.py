"""Classes that an option or a recorded config may name and that have moved: old dotted name to new one."""

from __future__ import annotations

from typing import Any

MOVED_TARGETS = {
    "ares_exp.budget.Budget": "ares_exp.running.budget.Budget",
    "ares_exp.retries.RetryRules": "ares_exp.running.retries.RetryRules",
}
"""New names of moved classes that options name: recorded runs and users' own options still use the old names."""


def with_moved_targets(config: Any) -> Any:
    """Returns a copy of a nested config in which every `_target_` has its present name."""
    if isinstance(config, dict):
        return {
            key: MOVED_TARGETS.get(value, value)
            if key == "_target_" and isinstance(value, str)
            else with_moved_targets(value)
            for key, value in config.items()
        }
    return [with_moved_targets(item) for item in config] if isinstance(config, list) else config
