"""Runs the table's cases with Harbor's code, where possible, and prints the differences.

`python -m tests.compatibility.harbor_reference [--episodes]`, with a Python that has Harbor, in this repository.
Episodes need a Docker engine.
"""

import asyncio
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harbor.models.job.config import DatasetConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from tests.compatibility.case import HOST, Case, Containers, Directory, Episode, Reading, Selection, write_task
from tests.compatibility.harbor_reading import UNKNOWN, containers, directory, reading
from tests.compatibility.outcome import as_json, files_below, manifest, matches
from tests.compatibility.sources import make_sources
from tests.compatibility.table import CASES


async def selection(case: Selection, folder: Path) -> Any:
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    options = make_sources(case, Path.cwd())
    is_one_task = Path(options.get("path", "."), "task.toml").exists()
    if not {"path", "registry"} & set(options) or case.repository or is_one_task:
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
        task=TaskConfig(path=root),
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
        wanted["steps"] = {name: {"reward": reward} for name, reward in case.expected["steps"].items()}
    if case.expected.get("truncated_by") == "time":
        wanted["error"] = "AgentTimeoutError"
    return wanted


async def ask_harbor(case: Case, folder: Path) -> tuple[Any, Any]:
    """What the table says of Harbor, and what Harbor does; both `None` where it cannot be asked."""
    if isinstance(case, Reading):
        found = reading(case, folder)
        wanted = {**case.examples, **case.reference}
        return [as_json(wanted[key]) for key in wanted], [as_json(found[key]) for key in wanted]
    if isinstance(case, Directory):
        return {"scan": case.scan, "load": case.loads}, directory(case, folder)
    if isinstance(case, Containers):
        found = containers(case, folder)
        return {key: found[key] if found[key] == UNKNOWN else case.expected[key] for key in found}, found
    if isinstance(case, Selection):
        wanted = case.expected if case.reference is None else case.reference
        names = await selection(case, folder)
        return (None, None) if names == UNKNOWN else (wanted, names)
    if isinstance(case, Episode) and "--episodes" in sys.argv and (wanted := expected_of_harbor(case)):
        return dict(wanted), matches(wanted, await episode(case, folder))
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
            print(f"{case.id}\n  table:  {wanted}\n  Harbor: {found}")
    print(f"{asked} of {len(CASES)} cases were put to Harbor, {wrong} are not as the table says.")
    return 1 if wrong else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    sys.exit(asyncio.run(main()))
