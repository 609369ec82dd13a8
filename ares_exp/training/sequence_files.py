"""Files of training sequences: Parquet, or JSON Lines with one row per line.

```
datasets.load_dataset("parquet", data_files="rows.parquet")
datasets.load_dataset("json", data_files="rows.jsonl")
```

| column | |
|---|---|
| `ids`, `mask`, `logprobs` | of equal length: tokens, 1 where one is trained on, its log-probability (0.0 elsewhere) |
| `reward` | of the episode; null if it has none |
| `rewards` | the rewards of verifier and scorers: `name` and `value` of each |
| `conversation`, `task`, `attempt`, `episode_id` | whose tokens they are; `attempt` is null if it is not known |
| `policy_versions` | of the weights that sampled, in order |
| `steps`, `starts` | number of each step that was sampled here, and where in `ids` its tokens start |
| `made` | `clean`, `realigned` or `forked` |
| `finish_reason` | of the last call; null if it is not known |
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
    """Writes a file atomically, without secrets.

    Args:
        path: The file; Parquet if its name ends with `.parquet`, compressed if it ends with `.zst`. Its directory must
            exist.
        rows: Taken one after the other.

    Raises:
        ConfigError: pyarrow is not installed, and the file is to be Parquet.
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
