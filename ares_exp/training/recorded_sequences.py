"""Training sequences of recorded episodes: of a finished run, or of one in progress as its episodes end.

```
recorded = RecordedSequences("outputs/first", conversations=["main", "sub-*"])
for report in recorded.new():              # of the episodes that ended since the last call
    use(report.rows)
async for report in recorded.follow():     # until the run has ended
    use(report.rows)
recorded.sentences()                       # what was made, and what was left out
```
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from functools import partial
from pathlib import Path

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import UntrainableError, UserError
from ares_exp.records.run_dir import RunDir
from ares_exp.training.sequences import SequenceCounts, SequenceReport, sequences_of
from ares_exp.trajectories.exports.training_conversations import left_out_sentences
from ares_exp.trajectories.files.line_file import has_writer
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import HeaderCache, load

UNTRAINABLE = "episodes that cannot be trained on"


class RecordedSequences:
    """Makes rows of the episodes of a run, each once.

    Attributes:
        counts: What was made so far.
        left_out: How many episodes gave no rows, by the reason.
        first_refusal: Why the first of those that cannot be trained on cannot; `None` while there is none.
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
        """Remembers where to look.

        Args:
            place: A run directory, a folder of runs, or a file of episodes.
            conversations: This and the rest as `sequences_of` takes them. Episodes that it rejects are left out, and
                counted.
            realign_tokens: See there.
            temperature: See there.
            altered_sampling: See there.
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
            TrajectoryFormatError: There is no such place, or a file there is broken.
        """
        for stored in load(self._place, cache=self._cache):
            if stored.episode_id not in self._seen:
                self._seen.add(stored.episode_id)
                if (report := self.add(stored.load())) is not None:
                    yield report

    async def follow(self, *, poll_sec: float = 1.0) -> AsyncIterator[SequenceReport]:
        """Yields reports as episodes end, until no process runs the run.

        Args:
            poll_sec: Seconds between two looks.

        Raises:
            UserError: The place is no run directory, or its run has not started.
            TrajectoryFormatError: A file there is broken.
        """
        while True:
            is_running = self._is_running()  # asked first: what ends in between is read all the same
            for report in self.new():
                yield report
            if not is_running:
                return
            await asyncio.sleep(poll_sec)

    def sentences(self) -> list[str]:
        """Returns what was made and left out, in sentences."""
        refused = [] if self.first_refusal is None else [f"The first of these: {self.first_refusal}"]
        return [*self.counts.sentences(), *left_out_sentences(self.left_out), *refused]

    def add(self, episode: EpisodeTrajectory) -> SequenceReport | None:
        """Makes the rows of an episode and counts them; `None` if it is left out."""
        if episode.total_reward is None:
            self.left_out["episodes without a reward"] += 1
            return None
        try:
            report = self._make_rows(episode)
        except UntrainableError as error:
            self.left_out[UNTRAINABLE] += 1
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
