"""How the text of a `Reading` is read: by the functions that tasks are read by."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.errors import TaskError, UserError, VerifierError
from ares_exp.tasks.harbor_task import resolve_env
from ares_exp.tasks.task_files import strip_canary
from ares_exp.tasks.task_sources.task_lists import parse_registry
from ares_exp.tasks.task_toml import TomlTable, parse_task_toml
from ares_exp.tasks.verification.verification import choose_reward, parse_reward_json, parse_reward_txt
from tests.compatibility.case import HOST, INVALID, Reading


def read(case: Reading, example: str | bytes) -> Any:
    if isinstance(example, bytes):
        return _rewards(case.text, example)
    if case.text == "task.toml":
        expected = case.examples[example]
        return _fields(example, expected if isinstance(expected, Mapping) else {})
    readers: dict[str, Callable[[str], Any]] = {
        "instruction.md": strip_canary,
        "template": _template,
        "registry.json": _registry,
    }
    return readers[case.text](example)


def _fields(toml: str, wanted: Mapping[str, Any]) -> Any:
    try:
        config = parse_task_toml(toml, path=Path("task.toml")).config
    except TaskError:
        return INVALID
    return {name: _plain(_field(config, name)) for name in wanted}


def _field(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, NetworkPolicy):
        return [value.mode, sorted(value.allowed_hosts)]
    if isinstance(value, TomlTable):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


def _template(text: str) -> str:
    try:
        return resolve_env({"KEY": text}, where="here", host=HOST)["KEY"]
    except TaskError:
        return INVALID


def _rewards(name: str, content: bytes) -> Any:
    try:
        rewards = parse_reward_txt(content) if name == "reward.txt" else parse_reward_json(content)
        choose_reward(rewards)
    except VerifierError as error:
        return type(error).__name__
    return rewards


def _registry(text: str) -> Any:
    try:
        datasets = parse_registry(text.encode(), where="registry.json")
    except UserError:
        return INVALID
    return [f"{one.name}@{one.version}: {' '.join(task.name for task in one.tasks)}" for one in datasets]
