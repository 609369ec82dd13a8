"""Files of training sequences (schema version 1): Parquet, or JSON Lines with a row a line.

```
datasets.load_dataset("parquet", data_files="rows.parquet")
datasets.load_dataset("json", data_files="rows.jsonl")
read_sequences(Path("rows.parquet"))     # TrainingSequence again
```

| column | |
|---|---|
| `ids`, `mask`, `logprobs` | of equal length: tokens, 1 where one is trained on, its log-probability (0.0 elsewhere) |
| `reward` | of the episode; null where it has none |
| `rewards` | what verifier and scorers said of it: `name` and `value` of each |
| `lane`, `task`, `attempt`, `episode_id` | whose tokens they are; `attempt` is null where it is not known |
| `policy_versions` | of the weights that sampled, in order |
| `steps`, `starts` | number of each step that was sampled here, and where in `ids` its tokens begin |
| `made` | `clean`, `realigned` or `forked` |
| `finish_reason` | of the last call; null where it is not known |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.run_dir import dump_json
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.training.sequences import TrainingSequence
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.exports.parquet_export import PARQUET_SUFFIX, import_parquet, parquet_file
from ares_exp.trajectories.files.line_file import ZSTD, read_lines, write_lines

JSONL_SUFFIXES = (".jsonl", f".jsonl{ZSTD}")
SUFFIXES = (PARQUET_SUFFIX, *JSONL_SUFFIXES)
SCHEMA_VERSION = 1
VERSION_KEY = "ares_exp.sequences_version"
"""The key of the schema version in the metadata of a Parquet file."""

_ROWS_AT_ONCE = 64
_COPIED = ("lane", "task", "episode_id", "made", "finish_reason", "reward", "attempt")
_LISTS = ("ids", "mask", "logprobs", "policy_versions", "steps", "starts")


def write_sequences(path: Path, rows: Iterable[TrainingSequence], *, sync: bool = True) -> None:
    """Writes a file that appears whole or not at all.

    Args:
        path: The file; its name ends with one of `SUFFIXES`, and its directory must be there.
        rows: Taken one after the other.
        sync: Whether it must survive a power cut once this returns.

    Raises:
        ConfigError: pyarrow is not installed, and the file is to be Parquet.
    """
    tables = map(row_to_dict, rows)
    if not is_parquet(path):
        write_lines(path, (f"{dump_json(row)}\n" for row in tables), sync=sync)
        return
    import_parquet()
    with parquet_file(path, sequence_schema(), {VERSION_KEY: str(SCHEMA_VERSION)}, sync=sync) as write:
        while batch := list(islice(tables, _ROWS_AT_ONCE)):
            write(batch)


def read_sequences(path: Path) -> Iterator[TrainingSequence]:
    """Yields the rows of a file.

    Raises:
        TrajectoryFormatError: It is no such file, or broken; the message names the path.
        ConfigError: pyarrow is not installed, and the file is Parquet.
    """
    checked = TypeAdapter(TrainingSequence)
    rows = _parquet_rows(path) if is_parquet(path) else _jsonl_rows(path)
    for number, row in enumerate(rows):
        try:
            rewards = {item["name"]: item["value"] for item in row["rewards"]}
            yield checked.validate_python({**row, "rewards": rewards})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise TrajectoryFormatError(
                f"{path}: row {number}: {f'`{place}`: ' if place else ''}{first['msg']}."
            ) from None
        except (KeyError, TypeError):
            raise TrajectoryFormatError(f"{path}: row {number} is no training sequence.") from None


def row_to_dict(row: TrainingSequence) -> dict[str, Any]:
    """Returns a row as the files have it, JSON-ready, without secrets."""
    texts = {name: _text(getattr(row, name)) for name in _COPIED}
    lists = {name: [_text(value) for value in getattr(row, name)] for name in _LISTS}
    rewards = [{"name": _text(name), "value": float(value)} for name, value in row.rewards.items()]
    return {**lists, **texts, "rewards": rewards}


def sequence_schema() -> Any:
    """Returns the Arrow schema, the same whatever the rows hold."""
    import pyarrow as pa

    text, integer, number = pa.string(), pa.int64(), pa.float64()
    columns = {
        "episode_id": text,
        "task": text,
        "attempt": integer,
        "lane": text,
        "reward": number,
        "rewards": pa.list_(pa.struct([("name", text), ("value", number)])),
        "policy_versions": pa.list_(text),
        "made": text,
        "finish_reason": text,
        "steps": pa.list_(integer),
        "starts": pa.list_(integer),
        "ids": pa.list_(integer),
        "mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(number),
    }
    return pa.schema(list(columns.items()))


def is_parquet(path: Path) -> bool:
    """Returns whether a file, by its name, is Parquet."""
    return path.name.endswith(PARQUET_SUFFIX)


def _jsonl_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with read_lines(path) as lines:
            for line in lines:
                yield json.loads(line.text)
    except (OSError, *BROKEN) as error:
        raise _broken(path, error) from error


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    parquet = import_parquet()
    import pyarrow

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, use_threads=False):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException, *BROKEN) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> TrajectoryFormatError:
    what = error.strerror if isinstance(error, OSError) else None
    return TrajectoryFormatError(f"{path}: {(what or what_broke(error)).rstrip('.')}.")


def _text(value: Any) -> Any:
    """Returns a text as valid UTF-8 without secrets; anything else as it is."""
    return mask_known_secrets(value.encode(errors="backslashreplace").decode()) if isinstance(value, str) else value
