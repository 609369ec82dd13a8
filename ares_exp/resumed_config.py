"""The config of a run that is resumed: as it was recorded, but for what is typed now.

Presets and options may have changed on disk since the run was begun, and the defaults with a newer version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ares_exp.errors import ConfigError
from ares_exp.record_files import read_record, read_yaml
from ares_exp.recorded_run import RecordedRun
from ares_exp.run_dir import RunDir
from ares_exp.secrets import MASK, scrub
from ares_exp.session import HARMLESS

if TYPE_CHECKING:
    from omegaconf import DictConfig


def restore(config: DictConfig, run_dir: RunDir, overrides: Sequence[str]) -> list[str]:
    """Gives what was not typed the value that it had. What cannot be given back stays; `open_session` looks at it.

    A file decides nothing that reaches this machine: another class, a reference or a masked secret is not taken over.

    Args:
        config: The composed config; changed.
        run_dir: Of the run.
        overrides: The command line's.

    Returns:
        The top-level keys that have changed on disk since.

    Raises:
        ConfigError: The records of the run cannot be read.
    """
    from omegaconf import OmegaConf, open_dict

    typed = _typed(run_dir, overrides)
    if typed is None or "experiment" in typed:
        return []
    recorded, changed = read_yaml(run_dir.config), []
    if not isinstance(recorded, dict):
        return []
    composed: Any = OmegaConf.to_container(config, resolve=True)
    for name in [key for key in composed if key in recorded and key not in typed and key not in HARMLESS]:
        was, now = recorded[name], composed[name]
        if scrub({name: now})[name] != was and _targets(was) == _targets(now) and _is_plain(was):
            with open_dict(config):
                OmegaConf.update(config, name, was, merge=False)
            changed.append(name)
    if "attempts" not in typed and (attempts := _last_attempts(run_dir)) is not None:
        config.attempts = attempts
    return changed


def _typed(run_dir: RunDir, overrides: Sequence[str]) -> set[str] | None:
    """The top-level keys that were typed now; `None` where that cannot be told."""
    try:
        recorded = set(RecordedRun(run_dir.path).overrides())
    except ConfigError:
        return None
    keys = [line.partition("=")[0].lstrip("+~") for line in overrides if line not in recorded]
    return {key.replace("/", ".").replace("@", ".").partition(".")[0] for key in keys}


def _last_attempts(run_dir: RunDir) -> int | None:
    """How many attempts the last session was asked for."""
    last = None
    try:
        for text in read_record(run_dir.sessions).splitlines():
            line = json.loads(text)
            attempts = line.get("attempts") if isinstance(line, dict) else None
            last = attempts if isinstance(attempts, int) and attempts > 0 else last
    except (OSError, ConfigError, ValueError, RecursionError):
        return last
    return last


def _targets(value: Any) -> list[Any]:
    return [item for key, item in _items(value) if key == "_target_"]


def _is_plain(value: Any) -> bool:
    return not any(isinstance(item, str) and ("${" in item or MASK in item) for _, item in _items(value))


def _items(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _items(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _items(item, key)
    else:
        yield key, value
