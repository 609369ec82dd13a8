"""Plays the table with Harbor's own code, where that can be done, and tells what is not as the table says.

`python -m tests.compatibility.harbor_reference [--episodes]`, with a Python that has Harbor, in this repository.
Episodes need a Docker engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from harbor.models.job.config import DatasetConfig
from harbor.models.registry import DatasetSpec
from harbor.models.task.config import NetworkMode, NetworkPolicy, TaskConfig
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import Task, strip_canary
from harbor.models.task.verifier_mode import (
    resolve_step_verifier_mode,
    resolve_task_verifier_mode,
    resolve_verifier_environment_definition,
)
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TrialConfig, VerifierConfig
from harbor.models.trial.config import TaskConfig as TrialTask
from harbor.models.trial.paths import TrialPaths
from harbor.models.verifier.result import VerifierResult
from harbor.trial.network_policy import resolve_trial_network_plan
from harbor.trial.trial import Trial
from harbor.utils.env import resolve_env_vars
from harbor.verifier.verifier import Verifier
from pydantic import BaseModel

from tests.compatibility.case import (
    HOST,
    INVALID,
    Case,
    Containers,
    Directory,
    Episode,
    Reading,
    Selection,
    write_task,
)
from tests.compatibility.outcome import as_json, files_below, manifest, matches
from tests.compatibility.sources import make_sources
from tests.compatibility.table import CASES

UNKNOWN = "unknown"
"""What Harbor says of a case that it cannot be asked about."""


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
        return UNKNOWN if field in ("compose_file", "users", "start_timeout_sec") else getattr(config.environment, field)
    definition = resolve_verifier_environment_definition(config, paths, steps[0])
    if field == "context_dir":
        return None if definition.config.docker_image and definition.bundled_tests else (
            definition.directory.relative_to(root).as_posix()
        )
    return UNKNOWN if field == "start_timeout_sec" else getattr(definition.config, field)


async def selection(case: Selection, folder: Path) -> Any:
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    options = make_sources(case, Path.cwd())
    if not {"path", "registry"} & set(options) or case.repository or case.id == "a single task":
        return UNKNOWN
    dataset = options.get("dataset", "").partition("@")
    chosen = {"task_names": options.get("tasks"), "exclude_task_names": options.get("exclude")}
    chosen |= {"n_tasks": options.get("limit")}
    try:
        if "registry" in options:
            source = {"name": dataset[0], "version": dataset[2] or None, "registry_path": Path(options["registry"])}
        else:
            source = {"path": Path(options["path"])}
        found = await DatasetConfig(**source, **chosen).get_task_configs()
    except (OSError, ValueError) as error:
        return type(error).__name__
    return [task.get_task_id().get_name() for task in found]


async def episode(case: Episode, folder: Path) -> Mapping[str, Any]:
    root = write_task(folder / "a-task", case.files, case.links)
    os.environ |= case.host
    agent: dict[str, Any] = {"name": "oracle"}
    if case.agent != "oracle":
        agent = {"import_path": "tests.compatibility.harbor_parts:ScriptedAgent"}
        agent["kwargs"] = {"commands": list(case.agent), "raises": case.raises}
    config = TrialConfig(
        task=TrialTask(path=root),
        trial_name="trial",
        trials_dir=folder / "trials",
        agent=AgentConfig(**agent),
        environment=EnvironmentConfig(import_path="tests.compatibility.harbor_parts:PlainContainer"),
        extra_instructions=case.options.get("extra_instructions", []),
    )
    try:
        result = await (await Trial.create(config)).run()
    except Exception as error:
        return {"error": type(error).__name__, "started": False}
    trial = folder / "trials" / "trial"
    return {
        "error": result.exception_info.exception_type if result.exception_info else None,
        "rewards": result.verifier_result.rewards if result.verifier_result else None,
        "steps": {
            step.step_name: step.verifier_result.rewards if step.verifier_result else None
            for step in result.step_results or []
        },
        "files": files_below(trial),
        "manifest": manifest(trial / "artifacts" / "manifest.json"),
    }


def expected_of_harbor(case: Episode) -> Mapping[str, Any]:
    """What Harbor is to come to; empty where the table says nothing of it."""
    if case.reference is not None:
        return case.reference
    if case.deviation or case.expected.get("error"):
        return {}
    wanted = {name: case.expected[name] for name in ("rewards", "files", "manifest") if name in case.expected}
    if "reward" in case.expected:
        wanted.setdefault("rewards", {"reward": case.expected["reward"]})
    if "steps" in case.expected:
        wanted["steps"] = {name: reward for name, reward in case.expected["steps"].items()}
    if case.expected.get("truncated_by") == "time":
        wanted["error"] = "AgentTimeoutError"
    return wanted


def _comparable(outcome: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A step's rewards as the one number that the table has of it, where it has that."""
    steps = {
        name: next(iter(rewards.values())) if rewards and not isinstance(wanted.get("steps", {}).get(name), dict) else rewards
        for name, rewards in outcome.get("steps", {}).items()
    }
    return {**outcome, "steps": steps}


async def ask_harbor(case: Case, folder: Path) -> tuple[Any, Any]:
    """What the table says of Harbor, and what Harbor does; both `None` where it cannot be asked."""
    if isinstance(case, Reading):
        found = reading(case, folder)
        wanted = {**case.examples, **case.reference}
        return [as_json(wanted[key]) for key in wanted], [as_json(found[key]) for key in wanted]
    if isinstance(case, Directory):
        return {"scan": case.scan, "load": case.load}, directory(case, folder)
    if isinstance(case, Containers):
        found = containers(case, folder)
        return {key: found[key] if found[key] == UNKNOWN else case.expected[key] for key in found}, found
    if isinstance(case, Selection):
        names = await selection(case, folder)
        return (case.expected if case.reference is None else case.reference, names) if names != UNKNOWN else (None, None)
    if isinstance(case, Episode) and "--episodes" in sys.argv and (wanted := expected_of_harbor(case)):
        outcome = _comparable(await episode(case, folder), wanted)
        return dict(wanted), matches(wanted, outcome)
    return None, None


async def main() -> int:
    os.environ.update(HOST)
    asked = wrong = 0
    here = Path.cwd()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            wanted, found = await ask_harbor(case, Path(folder))
            os.chdir(here)
        asked += wanted is not None
        if wanted != found:
            wrong += 1
            print(f"{case.section} {case.id}\n  table:  {wanted}\n  Harbor: {found}")
    print(f"{asked} of {len(CASES)} cases were put to Harbor, {wrong} are not as the table says.")
    return 1 if wrong else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    sys.exit(asyncio.run(main()))
