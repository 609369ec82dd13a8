"""Reads texts and task directories of the table with Harbor's own code."""

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from harbor.models.registry import DatasetSpec
from harbor.models.task.config import NetworkPolicy, TaskConfig
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import Task, strip_canary
from harbor.models.task.verifier_mode import (
    resolve_step_verifier_mode,
    resolve_task_verifier_mode,
    resolve_verifier_environment_definition,
)
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.verifier.result import VerifierResult
from harbor.trial.network_policy import resolve_trial_network_plan
from harbor.utils.env import resolve_env_vars
from harbor.verifier.verifier import Verifier
from pydantic import BaseModel

from tests.compatibility.case import INVALID, Containers, Directory, Reading, write_task

UNKNOWN = "unknown"
"""What Harbor says of something that it cannot be asked about."""


def reading(case: Reading, folder: Path) -> Mapping[Any, Any]:
    expected = {**case.examples, **case.reference}
    return {example: _read(case, example, wanted, folder) for example, wanted in expected.items()}


def _read(case: Reading, example: str | bytes, wanted: Any, folder: Path) -> Any:
    try:
        if isinstance(example, bytes):
            return _rewards(case.text, example, folder)
        readers: dict[str, Callable[[str], Any]] = {
            "task.toml": lambda text: _fields(text, wanted if isinstance(wanted, Mapping) else {}),
            "instruction.md": strip_canary,
            "template": lambda text: resolve_env_vars({"X": text})["X"],
            "registry.json": _registry,
        }
        return readers[case.text](example)
    except ValueError:
        return INVALID


def _fields(toml: str, wanted: Mapping[str, Any]) -> Any:
    config = TaskConfig.model_validate_toml(toml)
    return {name: _plain(_field(config, name)) for name in wanted}


def _field(value: Any, name: str) -> Any:
    for part in name.split("."):
        if part == "network":
            value = NetworkPolicy(network_mode=value.network_mode, allowed_hosts=value.allowed_hosts or [])
        else:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value or None if name.endswith(".destination") else value


def _plain(value: Any) -> Any:
    if isinstance(value, NetworkPolicy):
        return [value.network_mode.value, sorted(value.allowed_hosts)]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if name := getattr(value, "service", None):
        return name
    return value.value if isinstance(value, Enum) else value


def _rewards(name: str, content: bytes, folder: Path) -> Any:
    verifier = object.__new__(Verifier)
    verifier.trial_paths = TrialPaths(folder)
    verifier.trial_paths.verifier_dir.mkdir(parents=True, exist_ok=True)
    (verifier.trial_paths.verifier_dir / name).write_bytes(content)
    try:
        rewards = verifier._parse_reward_text() if name == "reward.txt" else verifier._parse_reward_json()
        return VerifierResult(rewards=rewards).rewards
    except Exception as error:
        return type(error).__name__


def _registry(text: str) -> list[str]:
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("not a list")
    found = [DatasetSpec.model_validate(row) for row in rows]
    return [f"{one.name}@{one.version}: {' '.join(task.name for task in one.tasks)}" for one in found]


def directory(case: Directory, folder: Path) -> Mapping[str, Any]:
    root = write_task(folder / "a-task", case.files, case.links)
    try:
        Task(root)
        loads = True
    except (OSError, ValueError):
        loads = False
    return {"scan": Task.is_valid_dir(root), "load": loads}


def containers(case: Containers, folder: Path) -> Mapping[str, Any]:
    root = write_task(folder / "a-task", case.files)
    return {name: _asked_for(root, name) for name in case.expected}


def _asked_for(root: Path, name: str) -> Any:
    config, paths = Task(root).config, TaskPaths(root)
    steps = config.steps or [None]
    modes = [resolve_step_verifier_mode(config, s) if s else resolve_task_verifier_mode(config) for s in steps]
    if name == "verifier":
        return [mode.value == "separate" for mode in modes]
    if name == "networks":
        run = (AgentConfig(), EnvironmentConfig(), VerifierConfig())
        plans = [
            resolve_trial_network_plan(config, *run, step, verifier_mode=mode)
            for step, mode in zip(steps, modes, strict=True)
        ]
        return [[_plain(one) for one in (p.agent_env_baseline, p.agent_phase, p.verifier_phase)] for p in plans]
    whose, _, field = name.partition(".")
    if whose == "agent":
        return (
            UNKNOWN if field in ("compose_file", "users", "start_timeout_sec") else getattr(config.environment, field)
        )
    definition = resolve_verifier_environment_definition(config, paths, steps[0])
    if field == "context_dir":
        return (
            None
            if definition.config.docker_image and definition.bundled_tests
            else (definition.directory.relative_to(root).as_posix())
        )
    return UNKNOWN if field == "start_timeout_sec" else getattr(definition.config, field)
