"""`registry.json` files, which contain named and versioned lists of tasks in local directories or git repositories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.record_files import read_record
from ares_exp.tasks.task_sources.git_names import check_git_ref, check_git_url
from ares_exp.tasks.toml_table import explain

REGISTRY = "registry.json"
SHOWN_DATASETS = 30


@dataclass(frozen=True, slots=True)
class DatasetName:
    """The name of a data set, as users write it. If the version is omitted, `newest` selects one."""

    name: str
    version: str | None = None

    def __str__(self) -> str:
        """Returns `name` or `name@version`."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """Parses `name[@version]`. Raises `ValueError` for invalid names and for names of packages (with a slash)."""
        name, at, version = text.partition("@")
        if "/" in name:
            raise ValueError(
                f"{text!r} is a package of Harbor's hosted service, which is not supported. A data set of "
                "Harbor's registry has no slash (`env.dataset=terminal-bench@2.0`). For a package, download it as "
                "a folder of tasks (`env.path=<folder>`), or set its repository (`env.repo=org/name`)"
            )
        if not name or (at and not version):
            raise ValueError(f"expected name or name@version, got {text!r}")
        return cls(name, version or None)


class _Row(BaseModel):
    """Base class of the objects in the file. Unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RegisteredTask(_Row):
    """An entry of `tasks`. A task without `git_url` is local or in the repository of the registry."""

    name: str
    path: str
    git_url: Annotated[str, AfterValidator(check_git_url)] | None = None
    git_commit_id: Annotated[str, AfterValidator(check_git_ref)] | None = None


class RegisteredMetric(_Row):
    """An entry of `metrics`, which describes how Harbor aggregates results. It is validated, but not used."""

    type: Literal["sum", "min", "max", "mean", "uv-script"]
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Dataset(_Row):
    """One version of a data set."""

    name: str
    version: str
    description: str
    tasks: tuple[RegisteredTask, ...]
    metrics: tuple[RegisteredMetric, ...] = ()


_REGISTRY = TypeAdapter(list[Dataset])


def read_registry(path: Path) -> list[Dataset]:
    """Reads the data sets in a registry file. Raises `ConfigError` if the file is unreadable or not a registry."""
    try:
        data = read_record(path)
    except OSError as error:
        found = {FileNotFoundError: "no file", IsADirectoryError: "a folder"}.get(type(error), error.strerror)
        raise ConfigError(f"{path}: expected a {REGISTRY}, but found {found}. Set `env.registry=<file>`.") from None
    return parse_registry(data, where=str(path))


def parse_registry(data: bytes, *, where: str) -> list[Dataset]:
    """Parses the content of a registry file. Raises a `ConfigError` that names the file (`where`) and every error."""
    try:
        rows = json.loads(data)
        return _REGISTRY.validate_python(rows)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, rows, root='the file')}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: invalid JSON: {error}.") from None


def choose(datasets: Sequence[Dataset], wanted: DatasetName, *, where: str) -> Dataset:
    """Returns the data set with this name and version. Raises `ConfigError` if it does not exist."""
    versions = [dataset for dataset in datasets if dataset.name == wanted.name]
    if not versions:
        names = list(dict.fromkeys(dataset.name for dataset in datasets))
        raise ConfigError(
            f"{where} has no data set {wanted.name!r}.{close_matches(wanted.name, names)} "
            f"Available data sets: {_listed(names)}."
        )
    known = [dataset.version for dataset in versions]
    version = wanted.version or newest(known)
    if version not in known:
        raise ConfigError(
            f"{where} has no version {version!r} of {wanted.name}.{close_matches(version, known)} "
            f"Available versions: {_listed(known)}."
        )
    return versions[known.index(version)]


def newest(versions: Sequence[str]) -> str:
    """Returns `head` if it exists, otherwise the highest Python version, otherwise the alphabetically last name."""
    if "head" in versions:
        return "head"
    numbered = []
    for version in versions:
        try:
            numbered.append((Version(version), version))
        except InvalidVersion:
            continue
    return max(numbered, key=lambda pair: pair[0])[1] if numbered else max(versions)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name!r:.100}" for name in names[:SHOWN_DATASETS])
    more = f", and {len(names) - SHOWN_DATASETS} more" if len(names) > SHOWN_DATASETS else ""
    return f"{shown}{more}" if names else "none"
