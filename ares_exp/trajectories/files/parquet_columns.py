"""The columns of the Parquet file of trajectories (schema version 1).

One row a step, in order; an episode without steps (its `reset()` failed) has one row whose step columns are null. The
rows of an episode stand together. Two columns hold everything, for reading episodes back: `episode_json` and
`step_json`. The others are for queries: what a step did not have, or had in a form that its column cannot hold, is null
there.

| columns of the episode, repeated in each row | |
|---|---|
| `episode_id`, `task_name`, `outcome`, `truncated` | as in `EpisodeTrajectory` |
| `total_reward` | null where the episode has none |
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
| `model`, `finish_reason`, `prompt_tokens`, `generated_tokens`, `cost` | of the response that led here |
| `response` | its text |
| `tool_calls` | its tool calls: `id`, `name`, `arguments` (JSON text as the model wrote it) |
| `completion_token_ids`, `logprobs` | where the engine gave them |
| `messages_added` | the messages of this request that no earlier one of the episode had, JSON text |
| `commands` | what the agent ran in the container: `command`, `exit_code`, `duration_sec`, `timed_out` |
| `step_json` | the step as `step_encoding` writes it, JSON text |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.errors import TrajectoryFormatError
from ares_exp.run_dir import dump_json
from ares_exp.secrets import mask_known_secrets
from ares_exp.trajectories.files.episode_file import closing_fields, opening_fields
from ares_exp.trajectories.files.step_encoding import StepEncoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

PARQUET_SCHEMA_VERSION = 1
VERSION_KEY = "ares_exp.schema_version"
"""The key of the schema version in the file's metadata."""

REPEATED = (
    "episode_id",
    "task_name",
    "outcome",
    "error_type",
    "error_message",
    "metadata",
    "episode_json",
    "step_type",
    "model",
    "finish_reason",
)
"""Columns that are written as a dictionary and numbers into it: they say the same in many rows."""


def parquet_schema() -> Any:
    """The explicit Arrow schema, whatever the episodes hold."""
    import pyarrow as pa

    text, integer, number = pa.string(), pa.int64(), pa.float64()
    tool_call = pa.struct([("id", text), ("name", text), ("arguments", text)])
    command = pa.struct(
        [("command", text), ("exit_code", integer), ("duration_sec", number), ("timed_out", pa.bool_())]
    )
    columns = {
        "episode_id": text,
        "task_name": text,
        "outcome": text,
        "total_reward": number,
        "start_time": number,
        "end_time": number,
        "num_steps": integer,
        "truncated": pa.bool_(),
        "error_type": text,
        "error_message": text,
        "metadata": text,
        "step_index": integer,
        "step_type": text,
        "reward": number,
        "discount": number,
        "returns_to_go": number,
        "timestamp": number,
        "policy_sec": number,
        "environment_sec": number,
        "container_sec": number,
        "model": text,
        "finish_reason": text,
        "prompt_tokens": integer,
        "generated_tokens": integer,
        "cost": number,
        "response": text,
        "tool_calls": pa.list_(tool_call),
        "completion_token_ids": pa.list_(integer),
        "logprobs": pa.list_(number),
        "messages_added": text,
        "commands": pa.list_(command),
        "episode_json": text,
        "step_json": text,
    }
    return pa.schema(list(columns.items()))


def arrow_table(rows: list[dict[str, Any]]) -> Any:
    """Rows as an Arrow table, repeated columns as dictionaries."""
    import pyarrow

    schema = parquet_schema()
    columns = {item.name: [row.get(item.name) for row in rows] for item in schema}
    arrays = {
        name: _dictionary(values) if name in REPEATED else pyarrow.array(values, schema.field(name).type)
        for name, values in columns.items()
    }
    return pyarrow.table(arrays)


def _dictionary(texts: list[str | None]) -> Any:
    """A column that has each text once: the metadata of an episode may be long, and is in each of its rows."""
    import pyarrow

    numbers: dict[str, int] = {}
    indices = [None if text is None else numbers.setdefault(text, len(numbers)) for text in texts]
    values = pyarrow.array(list(numbers), pyarrow.string())
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(indices, pyarrow.int32()), values)


def episode_rows(trajectory: EpisodeTrajectory) -> Iterator[dict[str, Any]]:
    """The rows of one episode. Raises `TrajectoryFormatError` where it has not `num_steps` steps."""
    if trajectory.num_steps != len(trajectory.steps):
        raise TrajectoryFormatError(
            f"Expected {trajectory.num_steps} steps of {trajectory.episode_id!r:.80}, got {len(trajectory.steps)}."
        )
    episode = _episode_columns(trajectory)
    if not trajectory.steps:
        yield episode
        return
    encoder = StepEncoder()
    for record, gain in zip(trajectory.steps, (None, *trajectory.returns_to_go()), strict=True):
        _, encoded = encoder.encode(record)
        yield {**episode, **_step_columns(record, encoded), "returns_to_go": _number(gain)}


def _episode_columns(trajectory: EpisodeTrajectory) -> dict[str, Any]:
    head = opening_fields(trajectory)
    error = trajectory.error
    return {
        "episode_id": _text(trajectory.episode_id),
        "task_name": _text(trajectory.task_name),
        "outcome": trajectory.outcome.value,
        "total_reward": _number(trajectory.total_reward),
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
    """Of an action that may be anything: somebody else's environment may have recorded it."""
    if action is None:
        return {}
    usage, pieces = action.get("usage"), action.get("data")
    usage = usage if isinstance(usage, Mapping) else {}
    pieces = [piece for piece in pieces if isinstance(piece, Mapping)] if isinstance(pieces, tuple) else None
    return {
        "model": _text(action.get("model")),
        "finish_reason": _text(action.get("finish_reason")),
        "prompt_tokens": _integer(usage.get("prompt_tokens")),
        "generated_tokens": _integer(usage.get("generated_tokens")),
        "cost": _number(action.get("cost")),
        "response": None if pieces is None else "".join(_text(piece.get("content")) or "" for piece in pieces),
        "tool_calls": None if pieces is None else [_tool_call(piece) for piece in pieces if "arguments" in piece],
        "completion_token_ids": _all(action.get("completion_token_ids"), _integer),
        "logprobs": _all(action.get("logprobs"), _number),
    }


def _tool_call(piece: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: _text(piece.get(name)) for name in ("id", "name", "arguments")}


def _text(value: Any) -> str | None:
    """Valid UTF-8 without secrets: half a surrogate pair, as a model may write it, becomes its escape."""
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
    """The values of a list, converted; `None` for anything else, or where one of them is something else."""
    if not isinstance(values, tuple):
        return None
    converted = [convert(value) for value in values]
    return None if None in converted else converted
