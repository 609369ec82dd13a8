"""Schemas of files: the key paths of JSON, lines of JSON, YAML and Parquet, with their types, by kind of file.

A line of a schema is a key path, `?` if what holds it can lack it, and the types that were met:

    error.message?: str          error is an object, mostly
    tasks.<task>.rewards[]: float|int
    outcome: str "completed" "truncated"

Keys that are data (names of tasks, ids of episodes, digests, paths) stand as `<task>`, `<episode>`, `<digest>`,
`<path>`; the values of some keys that name kinds are listed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
import zstandard

TASKS = (
    *("access-log-report", "count-records", "fix-moving-average", "monthly-revenue", "publish-release"),
    *("write-greeting", "two-steps", "cat", "dog", "nim_3", "nim_5"),
)
"""The tasks that are played."""
NAMED_VALUES = frozenset(
    {"schema", "schema_version", "version", "format", "type", "kind", "step_type", "outcome", "match", "state"}
)
"""Keys whose values are listed, where these are few and short."""
FEW = 12
CONFIGS = frozenset({"config.yaml", "multirun.yaml", "hydra.yaml", "overrides.yaml"})
"""Files whose keys are those of the composed config, or Hydra's."""

_LONG_OR_A_RELEASE = re.compile(r"^.{40}|^\d+\.\d+\.\d+$")
_TASK = "|".join(map(re.escape, TASKS))
_NAMES = (
    (re.compile(rf"({_TASK})__\d+(__\d+)?__[0-9a-f]{{8}}"), "<episode>"),
    (re.compile(rf"(?<![\w-])({_TASK})(__[A-Za-z0-9]+)?(?![\w-])"), "<task>"),
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])"), "<digest>"),
    (re.compile(r"objects/[0-9a-f]{2}/[0-9a-f]{62}"), "objects/<digest>"),
    (re.compile(r"(?<=@)\d+$"), "<step>"),
    (re.compile(r"^/.*"), "<path>"),
)
_ONE_FORMAT = (
    (re.compile(r"^(parts/)?\d+/"), ""),
    (re.compile(r"^(snapshots|branch_point)/"), "<snapshots>/"),
    (re.compile(r"(\.partial|\.zst)$"), ""),
    (re.compile(r"^json/"), "trajectories/"),
    (re.compile(r"^(jsonl/<episode>|trajectories\.recovered)\.jsonl"), "trajectories.jsonl"),
    (re.compile(r"steps/(one|two)/"), ""),
)


def normalised(name: str) -> str:
    """A key, or a part of a path, without what is data."""
    for pattern, word in _NAMES:
        name = pattern.sub(word, name)
    return name


class Schema:
    """What values of one kind have in common."""

    def __init__(self) -> None:
        self._types: dict[str, set[str]] = defaultdict(set)
        self._values: dict[str, set[str]] = defaultdict(set)
        self._counts: dict[str, int] = defaultdict(int)
        self._optional: set[str] = set()
        self._objects: dict[str, set[str]] = {}

    def add(self, value: Any, path: str = "") -> None:
        """Takes one more value into account."""
        if isinstance(value, Mapping):
            keys = {normalised(str(key)): item for key, item in value.items()}
            known = self._objects.setdefault(path, set(keys))
            self._optional |= {f"{path}.{key}" for key in known ^ set(keys)}
            known |= set(keys)
            self._types[path].add("object" if keys else "{}")
            for key, item in value.items():
                self.add(item, f"{path}.{normalised(str(key))}")
        elif isinstance(value, list | tuple):
            self._types[path].add("array" if value else "[]")
            for item in value:
                self.add(item, f"{path}[]")
        else:
            self._types[path].add("null" if value is None else type(value).__name__)
            key = path.rpartition(".")[2].removesuffix("[]")
            if key in NAMED_VALUES and value is not None and not _LONG_OR_A_RELEASE.search(str(value)):
                self._values[path].add(json.dumps(value))

    def lines(self) -> Iterator[str]:
        """The key paths, sorted."""
        for path, types in sorted(self._types.items()):
            kinds = "|".join(sorted(types))
            children = kinds in ("object", "array")
            if not path or (children and path not in self._optional):
                continue
            values = sorted(self._values[path]) if len(self._values[path]) <= FEW else []
            mark = "?" if path in self._optional else ""
            yield " ".join([f"{path.removeprefix('.')}{mark}: {kinds}", *values])


class Files:
    """The files of run directories: which there are, and the schemas of those that can be read."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self._schemas: dict[str, Schema] = defaultdict(Schema)

    def add(self, name: str, folder: Path) -> None:
        """Takes the files of a folder into account; the folder is called `name`."""
        names = self._names.setdefault(name, set())
        for path in sorted(folder.rglob("*")):
            known = _file_name(path.relative_to(folder))
            if path.is_dir() or "objects/tmp/" in known:
                continue
            names.add(known)
            if path.name not in CONFIGS:
                for kind, value in _values(path):
                    self._schemas[_kind_of_file(name, known) + kind].add(value)
            if path.name == "snapshot.json":
                self._add_objects(path)

    def add_value(self, kind: str, value: Any) -> None:
        """Takes a value into account that is in no file of its own."""
        self._schemas[kind].add(value)

    def text(self) -> str:
        """All of it."""
        lines = ["# The files of runs, by run", ""]
        for name, names in sorted(self._names.items()):
            lines += [f"## {name}", "", *sorted(names), ""]
        lines += ["# Schemas, by file", ""]
        for kind, schema in sorted(self._schemas.items()):
            lines += [f"## {kind}", "", *schema.lines(), ""]
        return "\n".join(lines)

    def _add_objects(self, snapshot: Path) -> None:
        """The objects that a snapshot names, by what it has them for."""
        metadata = json.loads(snapshot.read_text())
        for key in ("message_objects", "journal", "filesystem"):
            for digest in metadata[key]:
                frame = (snapshot.parent.parent / "objects" / digest[:2] / digest[2:]).read_bytes()
                for line in zstandard.ZstdDecompressor().decompress(frame).splitlines():
                    value = json.loads(line)
                    self._schemas[f"<snapshots>/objects, {key}{_line_kind(value)}"].add(value)


def _file_name(relative: PurePosixPath) -> str:
    name = str(PurePosixPath(*map(normalised, relative.parts)))
    name = re.sub(r"objects/[0-9a-f]{2}(?=$|/)", "objects/<xx>", name)
    name = re.sub(r"objects/<xx>/[0-9a-f]{62}", "objects/<xx>/<digest>", name)
    name = re.sub(r"events\.out\.tfevents\..*", "events.out.tfevents.<…>", name)
    return re.sub(r"(^|/)wandb/(?!run\.json).+", r"\1wandb/<…>", name)


def _kind_of_file(folder: str, name: str) -> str:
    """The name of a file, the same for those of one format: in a run, a job of a sweep, a part of a merged run."""
    if folder == "jobs":
        return re.sub(r"steps/(one|two)/", "", re.sub(r"^[^/]*/", "<Harbor job>/", name))
    for pattern, word in _ONE_FORMAT:
        name = pattern.sub(word, name)
    return name


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """What a file holds, each with what kind of a line it is."""
    name = path.name.removesuffix(".partial")
    data = path.read_bytes()
    if name.endswith(".zst"):
        name, data = name.removesuffix(".zst"), zstandard.ZstdDecompressor().stream_reader(data).read()
    if name.endswith(".jsonl"):
        for line in data.splitlines():
            value = json.loads(line)
            if value.get("kind") == "start":  # a line of metrics.jsonl
                del value["config"]
            yield _line_kind(value), value
    elif path.name.endswith(".partial"):  # not whole yet
        return
    elif name.endswith(".json"):
        yield "", json.loads(data)
    elif name.endswith(".yaml"):
        yield "", yaml.safe_load(data)
    elif name.endswith(".parquet"):
        import pyarrow.parquet

        table = pyarrow.parquet.read_schema(path)
        yield "", {field.name: str(field.type) for field in table} | {"_": sorted(_decoded(table.metadata))}


def _decoded(metadata: Mapping[bytes, bytes] | None) -> Iterable[str]:
    return (key.decode() for key in metadata or {})


def _line_kind(value: Any) -> str:
    """Of lines of several kinds: what they say they are, or else their first key."""
    if not isinstance(value, dict) or not value:
        return ""
    first = next(iter(value))
    for key in ("kind", "type"):
        if isinstance(value.get(key), str) and value[key].isidentifier():
            return f', "{key}": "{value[key]}"'
    return f', "{first}" first'
