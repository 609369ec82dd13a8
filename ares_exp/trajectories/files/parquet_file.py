"""The Parquet file of episodes: one row a step, compressed with zstd; `parquet_columns` tells what the columns are.

Needs the package pyarrow (`pip install 'ares-exp[parquet]'`). A file that another program has filtered and written
again is read as well, as long as the two JSON columns are there and the rows of each episode are all there, together
and in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.run_dir import atomic_file
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.parquet_columns import (
    PARQUET_SCHEMA_VERSION,
    REPEATED,
    VERSION_KEY,
    arrow_table,
    episode_rows,
)
from ares_exp.trajectories.files.schema_versions import read_steps
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, episode_fields

ROWS_PER_GROUP = 4096
CHARS_PER_GROUP = 16_000_000
"""A row group is written when the steps in it come to this, so that writing takes no more memory than that."""

MAX_CHARS = 1024**3
"""How long the JSON of the steps of one episode may be when it is read."""

ROWS_PER_BATCH = 256
JSON_COLUMNS = ["episode_json", "step_json"]
STATISTICS = ("episode_id", "task_name", "outcome", "total_reward", "start_time", "num_steps", "step_index", "reward")


def import_parquet() -> Any:
    """The module `pyarrow.parquet`. Raises `ConfigError` where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need the package pyarrow: `pip install 'ares-exp[parquet]'`.") from None
    return pyarrow.parquet


def write_parquet(path: Path, episodes: Iterable[EpisodeTrajectory], *, sync: bool = True) -> None:
    """Writes a file that appears whole or not at all; its size and the time grow with the length of the episodes.

    Args:
        path: The file; its directory must be there.
        episodes: Taken one after the other: no more than one is in memory, and the rows of one row group.
        sync: Whether it must survive a power cut once this returns.
    """
    parquet = import_parquet()
    with (
        atomic_file(path, sync=sync) as file,
        parquet.ParquetWriter(
            file,
            arrow_table([]).schema,
            store_schema=False,  # for readers, a text is a text, whether it is written as a dictionary or not
            compression="zstd",
            compression_level=3,
            use_dictionary=list(REPEATED),
            dictionary_pagesize_limit=2**30,  # a repeated column that outgrew it would be written out in every row
            write_statistics=list(STATISTICS),
            write_page_checksum=True,
        ) as writer,
    ):
        writer.add_key_value_metadata({VERSION_KEY: str(PARQUET_SCHEMA_VERSION)})
        for rows in _row_groups(row for episode in episodes for row in episode_rows(episode)):
            writer.write_table(arrow_table(rows))


def _row_groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    chars = 0
    for row in rows:
        group.append(row)
        chars += len(row.get("step_json", ""))
        if len(group) >= ROWS_PER_GROUP or chars >= CHARS_PER_GROUP:
            yield group
            group, chars = [], 0
    if group:
        yield group


class RowPlace(NamedTuple):
    """Where a row is in a file: the number of its row group, and its own within that."""

    group: int = 0
    row: int = 0


FIRST_ROW = RowPlace()


def read_parquet(path: Path, *, start: RowPlace = FIRST_ROW) -> Iterator[EpisodeTrajectory]:
    """The episodes of a file, one after the other.

    Args:
        path: The file.
        start: Where the first wanted episode begins, as `parquet_headers` tells it.

    Raises:
        TrajectoryFormatError: It is no such file, or broken; the message names the path and the row.
        ConfigError: pyarrow is not installed.
    """
    with _opened(path) as file:
        for rows in _episodes(file, start, with_steps=True):
            steps: list[StepRecord] = []
            file.place = rows.begin
            for step in read_steps({**rows.head, "steps": rows.steps}):
                steps.append(step)
                file.place = rows.places[min(len(steps), len(rows.places) - 1)]
            yield EpisodeTrajectory(steps=tuple(steps), **episode_fields(rows.head))


def parquet_headers(path: Path) -> Iterator[tuple[RowPlace, Mapping[str, Any]]]:
    """What a file says of its episodes but for their steps, which are not read.

    Yields:
        Where an episode begins, and its fields, those of `EpisodeTrajectory` in their JSON form.

    Raises:
        TrajectoryFormatError, ConfigError: As `read_parquet` does.
    """
    with _opened(path) as file:
        for rows in _episodes(file, FIRST_ROW, with_steps=False):
            yield rows.begin, rows.head


def salvage_parquet(path: Path) -> tuple[list[EpisodeTrajectory], list[str]]:
    """The episodes before the first thing that is wrong with a file, and what that is.

    Raises:
        TrajectoryFormatError: Not even the first one can be read. A file that was cut short has lost the table of
            contents at its end: nothing of it can be.
    """
    episodes: list[EpisodeTrajectory] = []
    try:
        episodes.extend(read_parquet(path))
    except TrajectoryFormatError as error:
        if not episodes:
            raise
        return episodes, [str(error)]
    return episodes, []


@dataclass(slots=True)
class _Rows:
    """The rows of one episode."""

    begin: RowPlace
    text: str
    head: Mapping[str, Any]
    count: int = 0
    chars: int = 0
    steps: list[Any] = field(default_factory=list)
    places: list[RowPlace] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.head['num_steps']} rows of episode {self.head['episode_id']!r:.80}"

    def add(self, place: RowPlace, step: Any) -> None:
        """Takes a step, the text of a JSON object."""
        self.steps.append(_object(step))
        self.places.append(place)
        self.chars += len(step)
        if self.chars > MAX_CHARS:
            raise ValueError(f"expected at most {MAX_CHARS} characters in the {self}, got more")


@dataclass(slots=True)
class _OpenFile:
    """A file, and the row that is being read."""

    parquet: Any
    place: RowPlace | None = None


def _episodes(file: _OpenFile, start: RowPlace, *, with_steps: bool) -> Iterator[_Rows]:
    """The rows of each episode; without their steps where those are not wanted."""
    rows: _Rows | None = None
    for place, text, step in _json_rows(file.parquet, start, with_steps=with_steps):
        file.place = place
        if rows is None:
            rows = _Rows(place, text, _head(text))
        elif text != rows.text:
            raise ValueError(f"expected {rows}, got another's")
        rows.count += 1
        if with_steps and rows.head["num_steps"]:
            rows.add(place, step)
        if rows.count >= rows.head["num_steps"]:
            yield rows
            rows = None
    if rows is not None:
        raise ValueError(f"expected {rows}, the file ends before")


def _object(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r:.80}")
    if not isinstance(data := json.loads(text), dict):
        raise TypeError(f"expected a JSON object, got {type(data).__name__}")
    return data


def _head(text: Any) -> dict[str, Any]:
    head = _object(text)
    if episode_fields(head)["num_steps"] < 0:
        raise ValueError(f"expected `num_steps` to be 0 or more, got {head['num_steps']}")
    return head


def _json_rows(parquet: Any, start: RowPlace, *, with_steps: bool) -> Iterator[tuple[RowPlace, Any, Any]]:
    """Place, `episode_json` and `step_json` of each row from `start` on."""
    names = JSON_COLUMNS if with_steps else JSON_COLUMNS[:1]
    total = 0
    for group in range(start.group, parquet.num_row_groups):
        begin = 0
        for batch in parquet.iter_batches(ROWS_PER_BATCH, row_groups=[group], columns=names, use_threads=False):
            heads = _texts(batch.column("episode_json"))
            steps = _texts(batch.column("step_json")) if with_steps else repeat(None, batch.num_rows)
            for row, (head, step) in enumerate(zip(heads, steps, strict=True), begin):
                if (place := RowPlace(group, row)) >= start:
                    yield place, head, step
            begin += batch.num_rows
        total += begin
    expected = parquet.metadata.num_rows
    if total != expected if start == FIRST_ROW else total == 0:  # a damaged page may be passed over without a word
        raise ValueError(f"expected {expected} rows in all, got {total} from row group {start.group} on")


def _texts(column: Any) -> Iterator[str | None]:
    """The values of a column that was read as a dictionary: a text that is there a million times takes memory once."""
    values = column.dictionary.to_pylist()
    return (None if index is None else values[index] for index in column.indices.to_pylist())


@contextmanager
def _opened(path: Path) -> Iterator[_OpenFile]:
    """Opens a file, and tells whatever is wrong with it, also while it is read, as `TrajectoryFormatError`."""
    pq = import_parquet()
    import pyarrow

    place: RowPlace | None = None
    try:
        _refuse_foreign(pq.read_schema(path))
        with pq.ParquetFile(
            path,
            read_dictionary=JSON_COLUMNS,
            pre_buffer=False,
            page_checksum_verification=True,
            thrift_string_size_limit=100_000_000,
            thrift_container_size_limit=1_000_000,
        ) as parquet:
            file = _OpenFile(parquet)
            try:
                yield file
            finally:
                place = file.place
    except (OSError, pyarrow.ArrowException, *BROKEN) as error:
        where = "" if place is None else f" at row {place.row} of row group {place.group}"
        what = error.strerror if isinstance(error, OSError) else None
        remedy = f" `python -m ares_exp.trajectories recover {path}` keeps what is good." if place else ""
        raise TrajectoryFormatError(f"{path}{where}: {(what or what_broke(error)).rstrip('.')}.{remedy}") from error


def _refuse_foreign(schema: Any) -> None:
    """Raises `TypeError` or `ValueError` for a file that is not ours.

    What else the file says of itself is left to the reader: pyarrow ends the process when it is asked for details of a
    damaged table of contents.
    """
    version = (schema.metadata or {}).get(VERSION_KEY.encode(), b"1").decode(errors="replace")
    if version != str(PARQUET_SCHEMA_VERSION):
        raise ValueError(f"expected {VERSION_KEY} {PARQUET_SCHEMA_VERSION}, got {version!r:.80}: update ares_exp")
    for name in JSON_COLUMNS:
        index = schema.get_field_index(name)
        kind = schema.field(index).type if index >= 0 else None
        if not str(kind).removeprefix("dictionary<values=").startswith(("string", "large_string")):
            raise TypeError(f"expected the rows of trajectories with a text column `{name}`, got {kind or 'none'}")
