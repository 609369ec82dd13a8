"""The Parquet export of episodes: one table with one row per step, for analysis with SQL or data frames.

The export needs the package pyarrow (`pip install 'ares-exp[parquet]'`). The file is compressed with zstd. If an
episode has no steps because `reset()` failed, it has one row whose step columns are null. The rows of an episode are
consecutive, in the order of the steps.

| columns of the episode, repeated in each row | |
|---|---|
| `episode_id`, `task_name`, `outcome`, `truncated` | as in `EpisodeTrajectory` |
| `total_reward` | null if the episode has no reward |
| `rewards` | a map of the verifier's and the scorers' rewards by name; may be empty |
| `start_time`, `end_time` | epoch seconds |
| `num_steps` | number of records, including FIRST |
| `error_type`, `error_message` | null if there was no error |
| `metadata` | JSON text |

| columns of the step | |
|---|---|
| `step_index`, `step_type`, `reward`, `discount`, `timestamp` | as in `StepRecord` |
| `returns_to_go` | rewards from this step on, undiscounted; null on FIRST, and if the episode has no reward |
| `policy_sec`, `environment_sec`, `container_sec` | seconds of wall-clock time |
| `conversation` | the conversation of the response that led to this step; null on FIRST |
| `request_conversation` | the conversation of the pending request; null on LAST |
| `model`, `policy_version`, `finish_reason`, `prompt_tokens`, `generated_tokens`, `cost` | fields of the response |
| `cached_tokens`, `reasoning_tokens` | parts of the prompt tokens and of the generated tokens; null if unknown |
| `response` | the text of the response |
| `reasoning` | the readable reasoning of the response; null without reasoning |
| `tool_calls` | the tool calls of the response: `id`, `name`, `arguments` (JSON text as the model wrote it) |
| `completion_token_ids`, `logprobs` | null if the policy did not return them |
| `messages_added` | the messages of this request that were not in an earlier request of the episode, as JSON text |
| `commands` | commands of the agent in the container: `command`, `exit_code`, `duration_sec`, `timed_out` |

The columns of the response are null for an action that is not an LLM response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.llms.response import ToolCallData
from ares_exp.records.run_dir import atomic_file, dump_json
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.trajectories.files.step_encoding import StepEncoder
from ares_exp.trajectories.records import (
    BROKEN,
    STEP_FIELDS,
    EpisodeTrajectory,
    StepRecord,
    command_to_dict,
    conversation_of,
    deserialize_llm_response,
)

PARQUET_SUFFIX = ".parquet"


def write_parquet(path: Path, episodes: Iterable[EpisodeTrajectory]) -> None:
    """Writes episodes to a Parquet file, atomically. Only one episode is in memory at a time.

    Raises:
        ConfigError: pyarrow is not installed.
        TrajectoryFormatError: A value of an episode does not fit its column.
    """
    write_table(path, _columns, map(_episode_rows, episodes))


def write_table(path: Path, columns: Any, batches: Iterable[Iterable[Mapping[str, Any]]]) -> None:
    """Writes rows to a Parquet file atomically, without secrets.

    Args:
        path: The file, whose directory must exist.
        columns: Function that gets the module `pyarrow`, and returns the Arrow types of the columns by name.
        batches: The rows in batches. Only one batch is in memory at a time.

    Raises:
        ConfigError: pyarrow is not installed.
        TrajectoryFormatError: A value does not fit its column.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise ConfigError("Parquet files need the package pyarrow: `pip install 'ares-exp[parquet]'`.") from None
    schema = pyarrow.schema(list(columns(pyarrow).items()))
    # Without the stored Arrow schema, readers get plain text columns, even if they were written as dictionaries.
    with (
        atomic_file(path) as file,
        ParquetWriter(file, schema, compression="zstd", write_page_checksum=True, store_schema=False) as writer,
    ):
        for batch in batches:
            rows = [_storable(row) for row in batch]
            try:
                table = pyarrow.Table.from_pylist(rows, schema)
            except (pyarrow.ArrowException, OverflowError) as error:
                raise TrajectoryFormatError(
                    f"Cannot write the rows of {rows[0].get('episode_id')!r:.80} to a table: {error}."
                ) from error
            writer.write_table(table)


def _storable(value: Any) -> Any:
    """Masks secrets in all strings of a value, and escapes lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return mask_known_secrets(value.encode(errors="backslashreplace").decode())
    if isinstance(value, Mapping):
        return {_storable(key): _storable(item) for key, item in value.items()}
    return [_storable(item) for item in value] if isinstance(value, list) else value


def _columns(pa: Any) -> dict[str, Any]:
    text, integer, number = pa.string(), pa.int64(), pa.float64()
    repeated = pa.dictionary(pa.int32(), text)  # keeps each repeated value in memory only once
    tool_call = pa.struct([("id", text), ("name", text), ("arguments", text)])
    command = pa.struct(
        [("command", text), ("exit_code", integer), ("duration_sec", number), ("timed_out", pa.bool_())]
    )
    return {
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
        "conversation": text,
        "request_conversation": text,
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
    }


_OF_EPISODE = ("episode_id", "task_name", "total_reward", "start_time", "end_time", "num_steps", "truncated")
_OF_RESPONSE = ("model", "policy_version", "finish_reason", "cost", "completion_token_ids", "logprobs")


def _episode_rows(episode: EpisodeTrajectory) -> Iterator[dict[str, Any]]:
    of_episode = {
        **{name: getattr(episode, name) for name in _OF_EPISODE},
        "outcome": episode.outcome.value,
        "rewards": dict(episode.rewards),
        "error_type": None if episode.error is None else episode.error.type,
        "error_message": None if episode.error is None else episode.error.message,
        "metadata": dump_json(episode.metadata),
    }
    if not episode.steps:
        yield of_episode
        return
    encoder = StepEncoder()
    conversation: str | None = None
    for record, gain in zip(episode.steps, (None, *episode.returns_to_go()), strict=True):
        asked = None if record.observation is None else conversation_of(record.observation)
        messages = encoder.encode(record)[1].get("adds", {}).get("messages")
        yield {
            **of_episode,
            **{name: getattr(record, name) for name in STEP_FIELDS},
            "returns_to_go": gain,
            "conversation": conversation,
            "request_conversation": asked,
            "messages_added": dump_json(messages) if messages else None,
            "commands": [command_to_dict(command) for command in record.commands],
            **_response_columns(record),
        }
        conversation = asked


def _response_columns(record: StepRecord) -> dict[str, Any]:
    try:
        response = deserialize_llm_response(record.action or {})
        text, thoughts = response.text, "".join(piece.content for piece in response.thinking if not piece.redacted)
    except BROKEN:  # a custom environment may have other actions
        return {}
    return {
        **{name: getattr(response, name) for name in _OF_RESPONSE},
        "prompt_tokens": response.usage.prompt_tokens,
        "generated_tokens": response.usage.generated_tokens,
        "cached_tokens": response.usage.cached_tokens or None,
        "reasoning_tokens": response.usage.reasoning_tokens or None,
        "response": text,
        "reasoning": thoughts or None,
        "tool_calls": [
            {"id": piece.id, "name": piece.name, "arguments": piece.arguments}
            for piece in response.data
            if isinstance(piece, ToolCallData)
        ],
    }
