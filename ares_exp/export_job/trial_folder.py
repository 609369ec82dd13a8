"""Writes the folder of a trial."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.environments.scoring import ARTIFACTS_FOLDER, STEPS_FOLDER, VERIFIER_FOLDER
from ares_exp.export_job.copied_files import copy_tree, folder_names
from ares_exp.export_job.exported_errors import trial_error
from ares_exp.export_job.harbor_config import TRIAL, without_defaults
from ares_exp.export_job.locks import trial_lock
from ares_exp.export_job.trial_result import TrialIdentity, trial_result
from ares_exp.results import EpisodeResult
from ares_exp.run_dir import dump_json
from ares_exp.secrets import mask_known_secrets

AGENT_FOLDER = "agent"
TRAJECTORY = "trajectory.json"

_FILE_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]+")


def write_trial(
    folder: Path,
    trial: TrialIdentity,
    result: EpisodeResult | None,
    *,
    documents: Sequence[Mapping[str, Any] | None],
    files: Path,
    log: Sequence[str],
) -> dict[str, Any] | None:
    """Writes the folder; returns its `result.json`, which a trial that is under way has not.

    Args:
        folder: Is made.
        trial: Which trial it is.
        result: What came of it; `None`: it is under way.
        documents: Its ATIF documents: one, or one for each stage, and maybe one of what came after; `None` where there
            is none.
        files: What its tasks left on the host.
        log: The lines of its log.

    Raises:
        OSError: Something cannot be read or written.
    """
    stages = result.stages if result is not None else ()
    folder.mkdir()
    write_json(folder / "config.json", without_defaults(trial.config, TRIAL))
    if (lock := trial_lock(trial.task, trial.config)) is not None:
        write_json(folder / "lock.json", lock)
    _write_text(folder / "trial.log", log)
    places = [*(folder / STEPS_FOLDER / stage.name for stage in stages), folder][: len(documents)]
    for place, document in zip(places, documents, strict=True):
        for name in (AGENT_FOLDER, VERIFIER_FOLDER, ARTIFACTS_FOLDER):
            (place / name).mkdir(parents=True)
        if document is not None:
            write_json(place / AGENT_FOLDER / TRAJECTORY, document, indent=None)
    _copy_files(files, folder)
    if result is None:
        return None
    if (error := trial_error(result)) is not None:
        _write_text(folder / "exception.txt", [f"{error.type}: {error.message}"])
    data = trial_result(trial, result, documents)
    write_json(folder / "result.json", data)
    return data


def is_file_name(text: str) -> bool:
    """Whether a text from a record may be part of a path: nothing that leads elsewhere."""
    return _FILE_NAME.fullmatch(text) is not None


def write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 4) -> None:
    """Writes JSON as Harbor does."""
    path.write_text(dump_json(data, indent=indent), encoding="utf-8")


def _write_text(path: Path, lines: Sequence[str]) -> None:
    text = mask_known_secrets("".join(f"{line}\n" for line in lines))
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _copy_files(files: Path, folder: Path) -> None:
    for name in (VERIFIER_FOLDER, ARTIFACTS_FOLDER):
        copy_tree(files / name, folder / name)
    for step in folder_names(files / STEPS_FOLDER):
        for name in (VERIFIER_FOLDER, ARTIFACTS_FOLDER):
            copy_tree(files / STEPS_FOLDER / step / name, folder / STEPS_FOLDER / step / name)
