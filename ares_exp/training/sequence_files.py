"""Files of training sequences: Parquet, or JSON Lines with one row per line.

```
datasets.load_dataset("parquet", data_files="rows.parquet")
datasets.load_dataset("json", data_files="rows.jsonl")
```

The columns are the fields of `TrainingSequence`. `rewards` is a list of objects with `name` and `value`, because the
columns of a Parquet file have fixed names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from ares_exp.records.run_dir import dump_json
from ares_exp.training.sequences import TrainingSequence
from ares_exp.trajectories.exports.parquet_export import PARQUET_SUFFIX, write_table
from ares_exp.trajectories.files.line_file import write_lines

_ROWS_AT_ONCE = 64


def write_sequences(path: Path, rows: Iterable[TrainingSequence]) -> None:
    """Writes a file of training sequences atomically, and masks secrets.

    Args:
        path: The file. The format is Parquet if the name ends with `.parquet`, otherwise JSON Lines. A name that ends
            with `.zst` selects compression. The directory must exist.
        rows: The rows, which are read one by one.

    Raises:
        ConfigError: The file is a Parquet file, and pyarrow is not installed.
    """
    tables = map(_row, rows)
    if path.name.endswith(PARQUET_SUFFIX):
        write_table(path, _columns, iter(lambda: list(islice(tables, _ROWS_AT_ONCE)), []))
    else:
        write_lines(path, (f"{dump_json(row)}\n" for row in tables))


def _row(sequence: TrainingSequence) -> dict[str, Any]:
    return {
        **{field.name: getattr(sequence, field.name) for field in fields(sequence)},
        "policy_versions": list(sequence.policy_versions),
        "rewards": [{"name": name, "value": float(value)} for name, value in sequence.rewards.items()],
    }


def _columns(pa: Any) -> dict[str, Any]:
    text, integer, number = pa.string(), pa.int64(), pa.float64()
    return {
        "episode_id": text,
        "task": text,
        "attempt": integer,
        "conversation": text,
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
