"""The Parquet file of episodes (schema version 4): a table for queries, one row a step, compressed with zstd.

Needs the package pyarrow (`pip install 'ares-exp[parquet]'`). An episode without steps (its `reset()` failed) has one
row whose step columns are null. The rows of an episode stand together, in order. What a step did not have, or had in a
form that its column cannot hold, is null. The columns `episode_json` and `step_json` hold everything, so that `convert`
can make a record (JSON, JSON Lines) of the file; nothing else reads it.

| columns of the episode, repeated in each row | |
|---|---|
| `episode_id`, `task_name`, `outcome`, `truncated` | as in `EpisodeTrajectory` |
| `total_reward` | null where the episode has none |
| `rewards` | what verifier and scorers said, by name, a map; empty where nothing was |
| `start_time`, `end_time` | epoch seconds |
| `num_steps` | its records, FIRST included |
| `error_type`, `error_message` | null where nothing went wrong |
| `metadata` | JSON text |
| `episode_json` | all fields but the steps, as in the file of one episode (`episode_file`), JSON text |

| columns of the step | |
|---|---|
| `step_index`, `step_type`, `reward`, `discount`, `timestamp` | as in `StepRecord` |
| `returns_to_go` | rewards from this step on, undiscounted; null on FIRST, and where the episode has no reward |
| `policy_sec`, `environment_sec`, `container_sec` | wall seconds |
| `lane` | the conversation of the response that led here: `main`, a sub-agent's or a side call's; null on FIRST |
| `request_lane` | that of the pending request; null on LAST |
| `model`, `policy_version`, `finish_reason`, `prompt_tokens`, `generated_tokens`, `cost` | of the response |
| `cached_tokens`, `reasoning_tokens` | likewise, those of the prompt and of the generated ones; null where not known |
| `response` | its text |
| `reasoning` | its reasoning, as far as it can be read; null where there is none |
| `tool_calls` | its tool calls: `id`, `name`, `arguments` (JSON text as the model wrote it) |
| `completion_token_ids`, `logprobs` | where the engine gave them |
| `messages_added` | the messages of this request that no earlier one of the episode had, JSON text |
| `commands` | what the agent ran in the container: `command`, `exit_code`, `duration_sec`, `timed_out` |
| `step_json` | the step as `step_encoding` writes it, JSON text |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.records.run_dir import atomic_file, dump_json
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.episode_file import closing_fields, opening_fields
from ares_exp.trajectories.files.schema_versions import check_version
from ares_exp.trajectories.files.step_encoding import StepEncoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, lane_of

PARQUET_SUFFIX = ".parquet"
SCHEMA_VERSION = 4
VERSION_KEY = "ares_exp.schema_version"
"""The key of the schema version in the file's metadata."""

JSON_COLUMNS = ["episode_json", "step_json"]
ROWS_PER_BATCH = 256


def import_parquet() -> Any:
    """Imports `pyarrow.parquet`. Raises `ConfigError` where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need the package pyarrow: `pip install 'ares-exp[parquet]'`.") from None
    return pyarrow.parquet


def write_parquet(path: Path, episodes: Iterable[EpisodeTrajectory], *, sync: bool = True) -> None:
    """Writes a file that appears whole or not at all.

    Args:
        path: The file; its directory must be there.
        episodes: Taken one after the other: the rows of no more than one are in memory.
        sync: Whether it must survive a power cut once this returns.
    """
    import_parquet()
    with parquet_file(path, parquet_schema(), {VERSION_KEY: str(SCHEMA_VERSION)}, sync=sync) as write:
        for episode in episodes:
            write(list(episode_rows(episode)))


@contextmanager
def parquet_file(
    path: Path, schema: Any, metadata: Mapping[str, str], *, sync: bool
) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Yields what writes rows to a file, which appears whole when the body ends without an exception."""
    parquet = import_parquet()
    import pyarrow

    with (
        atomic_file(path, sync=sync) as file,
        # Without the stored schema a text is a text for readers, whether it was written as a dictionary or not.
        parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True, store_schema=False) as writer,
    ):
        writer.add_key_value_metadata(dict(metadata))
        yield lambda rows: writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def read_parquet(path: Path) -> Iterator[EpisodeTrajectory]:
    """Yields the episodes of a file, also of one that another program has filtered.

    Raises:
        TrajectoryFormatError: It is no such file, or broken; the message names the path.
        ConfigError: pyarrow is not installed.
    """
    parquet = import_parquet()
    import pyarrow

    try:
        with parquet.ParquetFile(path, read_dictionary=JSON_COLUMNS[:1], page_checksum_verification=True) as file:
            if VERSION_KEY.encode() in (metadata := file.schema_arrow.metadata or {}):
                check_version(json.loads(metadata[VERSION_KEY.encode()]), SCHEMA_VERSION)
            rows = (
                row
                for batch in file.iter_batches(ROWS_PER_BATCH, columns=JSON_COLUMNS, use_threads=False)
                for row in batch.to_pylist()
            )
            for text, group in groupby(rows, key=lambda row: row["episode_json"]):
                episode = json.loads(text)
                steps = [json.loads(row["step_json"]) for row in group if row["step_json"] is not None]
                yield EpisodeTrajectory.from_dict({**episode, "steps": steps})
    except (OSError, pyarrow.ArrowException, *BROKEN) as error:
        what = error.strerror if isinstance(error, OSError) else None
        raise TrajectoryFormatError(f"{path}: {(what or what_broke(error)).rstrip('.')}.") from error


def parquet_schema() -> Any:
    """Returns the Arrow schema, the same whatever the episodes hold."""
    import pyarrow as pa

    text, integer, number = pa.string(), pa.int64(), pa.float64()
    repeated = pa.dictionary(pa.int32(), text)  # in memory once, however many rows have it
    tool_call = pa.struct([("id", text), ("name", text), ("arguments", text)])
    command = pa.struct(
        [("command", text), ("exit_code", integer), ("duration_sec", number), ("timed_out", pa.bool_())]
    )
    columns = {
        "episode_id": repeated,
        "task_name": repeated,
        "outcome": repeated,
        "total_reward": number,
        "rewards": pa.map_(text, number),
        "start_time": number,
        "end_time": number,
        "num_steps": integer,
        "truncated": pa.bool_(),
        "error_type": repeated,
        "error_message": repeated,
        "metadata": repeated,
        "step_index": integer,
        "step_type": text,
        "reward": number,
        "discount": number,
        "returns_to_go": number,
        "timestamp": number,
        "policy_sec": number,
        "environment_sec": number,
        "container_sec": number,
        "lane": text,
        "request_lane": text,
        "model": text,
        "policy_version": text,
        "finish_reason": text,
        "prompt_tokens": integer,
        "generated_tokens": integer,
        "cached_tokens": integer,
        "reasoning_tokens": integer,
        "cost": number,
        "response": text,
        "reasoning": text,
        "tool_calls": pa.list_(tool_call),
        "completion_token_ids": pa.list_(integer),
        "logprobs": pa.list_(number),
        "messages_added": text,
        "commands": pa.list_(command),
        "episode_json": repeated,
        "step_json": text,
    }
    return pa.schema(list(columns.items()))


def episode_rows(trajectory: EpisodeTrajectory) -> Iterator[dict[str, Any]]:
    """Yields the rows of one episode. Raises `TrajectoryFormatError` where it has not `num_steps` steps."""
    if trajectory.num_steps != len(trajectory.steps):
        raise TrajectoryFormatError(
            f"Expected {trajectory.num_steps} steps of {trajectory.episode_id!r:.80}, got {len(trajectory.steps)}."
        )
    episode = _episode_columns(trajectory)
    if not trajectory.steps:
        yield episode
        return
    encoder = StepEncoder()
    lane: str | None = None
    for record, gain in zip(trajectory.steps, (None, *trajectory.returns_to_go()), strict=True):
        _, encoded = encoder.encode(record)
        asked = None if record.observation is None else _text(lane_of(record.observation))
        lanes = {"lane": lane, "request_lane": asked}
        yield {**episode, **_step_columns(record, encoded), **lanes, "returns_to_go": _number(gain)}
        lane = asked


def _episode_columns(trajectory: EpisodeTrajectory) -> dict[str, Any]:
    head = opening_fields(trajectory)
    error = trajectory.error
    return {
        "episode_id": _text(trajectory.episode_id),
        "task_name": _text(trajectory.task_name),
        "outcome": trajectory.outcome.value,
        "total_reward": _number(trajectory.total_reward),
        "rewards": [(_text(name), _number(value)) for name, value in trajectory.rewards.items()],
        "start_time": _number(trajectory.start_time),
        "end_time": _number(trajectory.end_time),
        "num_steps": trajectory.num_steps,
        "truncated": trajectory.truncated,
        "error_type": _text(error.type) if error is not None else None,
        "error_message": _text(error.message) if error is not None else None,
        "metadata": dump_json(trajectory.metadata),
        "episode_json": dump_json({**head, **closing_fields(trajectory)}),
    }


def _step_columns(record: StepRecord, encoded: Mapping[str, Any]) -> dict[str, Any]:
    messages = encoded.get("adds", {}).get("messages")
    return {
        "step_index": _integer(record.step_index),
        "step_type": record.step_type,
        "reward": _number(record.reward),
        "discount": _number(record.discount),
        "timestamp": _number(record.timestamp),
        "policy_sec": _number(record.policy_sec),
        "environment_sec": _number(record.environment_sec),
        "container_sec": _number(record.container_sec),
        "messages_added": dump_json(messages) if messages else None,
        "commands": [
            {
                "command": _text(command.command),
                "exit_code": _integer(command.exit_code),
                "duration_sec": _number(command.duration_sec),
                "timed_out": command.timed_out is True,
            }
            for command in record.commands
        ],
        "step_json": dump_json(encoded),
        **_response_columns(record.action),
    }


def _response_columns(action: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the columns of an action, which may be anything: another's environment may have recorded it."""
    if action is None:
        return {}
    usage, pieces = action.get("usage"), action.get("data")
    usage = usage if isinstance(usage, Mapping) else {}
    pieces = [piece for piece in pieces if isinstance(piece, Mapping)] if isinstance(pieces, tuple) else None
    return {
        "model": _text(action.get("model")),
        "policy_version": _text(action.get("policy_version")),
        "finish_reason": _text(action.get("finish_reason")),
        "prompt_tokens": _integer(usage.get("prompt_tokens")),
        "generated_tokens": _integer(usage.get("generated_tokens")),
        "cached_tokens": _integer(usage.get("cached_tokens")),
        "reasoning_tokens": _integer(usage.get("reasoning_tokens")),
        "cost": _number(action.get("cost")),
        "response": None if pieces is None else "".join(_text(piece.get("content")) or "" for piece in pieces),
        "reasoning": _reasoning(pieces or ()),
        "tool_calls": None if pieces is None else [_tool_call(piece) for piece in pieces if "arguments" in piece],
        "completion_token_ids": _all(action.get("completion_token_ids"), _integer),
        "logprobs": _all(action.get("logprobs"), _number),
    }


def _reasoning(pieces: Iterable[Mapping[str, Any]]) -> str | None:
    texts = [_text(piece.get("thinking")) for piece in pieces if not piece.get("redacted")]
    return "".join(text for text in texts if text) or None


def _tool_call(piece: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: _text(piece.get(name)) for name in ("id", "name", "arguments")}


def _text(value: Any) -> str | None:
    """Returns valid UTF-8 without secrets: half a surrogate pair, as models may write it, becomes its escape."""
    if not isinstance(value, str):
        return None
    return mask_known_secrets(value.encode(errors="backslashreplace").decode())


def _integer(value: Any) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _all(values: Any, convert: Any) -> list[Any] | None:
    """Converts the values of a list; `None` for anything else, or if a value is something else."""
    if not isinstance(values, tuple):
        return None
    converted = [convert(value) for value in values]
    return None if None in converted else converted
