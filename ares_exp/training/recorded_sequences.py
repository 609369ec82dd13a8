"""Training sequences of recorded episodes, from a finished run or from a run in progress.

```
recorded = RecordedSequences("outputs/first", conversations=["main", "sub-*"])
for report in recorded.new():              # episodes that ended since the last call
    use(report.rows)
async for report in recorded.follow():     # until the run has ended
    use(report.rows)
recorded.sentences()                       # a summary of the rows and of skipped episodes
```

`write_sequences` writes rows to a file: Parquet, or JSON Lines with one row per line.

```
datasets.load_dataset("parquet", data_files="rows.parquet")
datasets.load_dataset("json", data_files="rows.jsonl")
```

The columns are the fields of `TrainingSequence`. `rewards` is a list of objects with `name` and `value`, because the
columns of a Parquet file have fixed names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import UntrainableError, UserError
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.records.validation import fields_of
from ares_exp.training.sequences import SequenceCounts, SequenceReport, TrainingSequence, sequences_of
from ares_exp.trajectories.exports.parquet_export import PARQUET_SUFFIX, write_table
from ares_exp.trajectories.exports.training_conversations import left_out_sentences
from ares_exp.trajectories.files.line_file import has_writer, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import HeaderCache, load


class RecordedSequences:
    """Creates training rows from the recorded episodes of a run. Each episode is used once.

    Attributes:
        counts: Counts of the rows that were created so far, and of their calls and tokens.
        left_out: Number of skipped episodes, by reason.
        first_refusal: Error message of the first episode that cannot be trained on; `None` if there is no such episode.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        conversations: Collection[str] = (MAIN_CONVERSATION,),
        realign_tokens: int = 0,
        temperature: float | None = 1.0,
        altered_sampling: bool = False,
    ) -> None:
        """Stores the arguments, without reading `place`: a run directory, a folder of runs, or a file of episodes.

        `sequences_of` describes the other arguments.
        """
        self._place = Path(place)
        self._make_rows = partial(
            sequences_of,
            conversations=conversations,
            realign_tokens=realign_tokens,
            temperature=temperature,
            altered_sampling=altered_sampling,
        )
        self._cache = HeaderCache()
        self._seen: set[str] = set()
        self.counts = SequenceCounts()
        self.left_out: Counter[str] = Counter()
        self.first_refusal: str | None = None

    def new(self) -> Iterator[SequenceReport]:
        """Yields the reports of episodes that have ended since the last call, in the order in which they started.

        Raises:
            TrajectoryFormatError: The path does not exist, or one of its files is broken.
        """
        for stored in load(self._place, cache=self._cache):
            if stored.episode_id not in self._seen:
                self._seen.add(stored.episode_id)
                if (report := self.add(stored.load())) is not None:
                    yield report

    async def follow(self, *, poll_sec: float = 1.0) -> AsyncIterator[SequenceReport]:
        """Yields reports as episodes end, until no process is executing the run.

        Args:
            poll_sec: Interval between two checks, in seconds.

        Raises:
            UserError: The path is not a run directory, or its run has not started.
            TrajectoryFormatError: A file of the run is broken.
        """
        while True:
            is_running = self._is_running()  # checked first, so that episodes that end meanwhile are also read
            for report in self.new():
                yield report
            if not is_running:
                return
            await asyncio.sleep(poll_sec)

    def sentences(self) -> list[str]:
        """Returns a summary of the rows and of the skipped episodes."""
        refused = [] if self.first_refusal is None else [f"The first of these: {self.first_refusal}"]
        return [*self.counts.sentences(), *left_out_sentences(self.left_out), *refused]

    def add(self, episode: EpisodeTrajectory) -> SequenceReport | None:
        """Creates and counts the rows of an episode. Returns `None` if it has no reward or cannot be trained on."""
        if episode.total_reward is None:
            self.left_out["episodes without a reward"] += 1
            return None
        try:
            report = self._make_rows(episode)
        except UntrainableError as error:
            self.left_out["episodes that cannot be trained on"] += 1
            self.first_refusal = self.first_refusal or str(error)
            return None
        self.counts.add(report)
        return report

    def _is_running(self) -> bool:
        try:
            return has_writer(RunDir(self._place).episodes)
        except OSError as error:
            raise UserError(
                f"Expected the directory of a run that has started, got {self._place}: {error.strerror}."
            ) from error


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
        **fields_of(sequence),
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
