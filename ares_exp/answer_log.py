"""The answer log: what an episode under way was asked and answered, on disk before the answer is applied.

One file an episode in the run directory, whatever the collectors do: `kill -9` loses no answer that was paid for. It
goes when the attempt has its result; one that is left is what a resumed run goes on with. Each line is a JSON object:
the first says which episode it is (`LoggedEpisode`), every other one is an encoded step (`step_encoding`) with a
request as its observation and the answer to it as its action.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.recorded_results import MAX_COUNT, is_countable
from ares_exp.run_dir import append_text, atomic_file, dump_json
from ares_exp.trajectories.files.line_file import read_lines
from ares_exp.trajectories.files.step_encoding import StepDecoder, StepEncoder
from ares_exp.trajectories.records import (
    StepRecord,
    deserialize_llm_response,
    serialize_llm_request,
    serialize_llm_response,
)

SUFFIX = ".jsonl"

logger = logging.getLogger(__name__)


class Exchange(NamedTuple):
    """A request, as `serialize_llm_request` gives it, and the answer to it."""

    request: Mapping[str, Any]
    answer: LLMResponse


@dataclass(frozen=True, slots=True)
class LoggedEpisode:
    """An episode that was under way, and what it was answered.

    Attributes:
        episode_id, task_name, attempt, retry, seed: As in its `EpisodeResult`.
        started_at: Epoch seconds; 0.0 of one that has not begun: it waits for its retry.
        parent: The episode that it took the first answers over from, if it did.
        taken_over: How many.
        exchanges: The answers it got, in order.
    """

    episode_id: str
    task_name: str
    attempt: int
    retry: int
    seed: int
    started_at: float
    parent: str | None = None
    taken_over: int = 0
    exchanges: Sequence[Exchange] = field(default=(), repr=False)

    @property
    def has_begun(self) -> bool:
        """Whether it was under way."""
        return self.started_at > 0

    @property
    def slot(self) -> tuple[str, int]:
        """The attempt: task and number."""
        return self.task_name, self.attempt

    @classmethod
    def read(cls, path: Path) -> LoggedEpisode:
        """Reads what is whole of a log; a line that was being written when its process died is left out.

        Raises:
            OSError: It cannot be read.
            ValueError: Not even its first line can.
        """
        exchanges: list[Exchange] = []
        decoder = StepDecoder()
        with read_lines(path) as lines:
            head = _head(next(lines).text)
            if head["episode_id"] != path.stem:
                raise ValueError(f"expected the log of {path.stem}, got that of {head['episode_id']!r:.80}")
            try:
                for line in lines:
                    record = decoder.decode(json.loads(line.text))
                    assert record.observation is not None
                    assert record.action is not None
                    exchanges.append(Exchange(record.observation, _countable(deserialize_llm_response(record.action))))
            except Exception as error:
                logger.info("%s: used up to line %d (%s)", path, len(exchanges) + 1, error)
        return cls(**head, exchanges=tuple(exchanges))


class AnswerLog:
    """Writes the log of one episode. A log that cannot be written is reported once, and changes nothing else."""

    def __init__(self, folder: Path, episode: LoggedEpisode) -> None:
        """Names the file; `begin` makes it."""
        self._path = folder / f"{episode.episode_id}{SUFFIX}"
        self._episode = episode
        self._encoder = StepEncoder()
        self._count = 0
        self._broken = False

    def begin(self, taken_over: Sequence[Exchange]) -> bool:
        """Makes the file, whole, with the answers that the episode takes over; one that is there is replaced. Blocking.

        Returns:
            Whether it could.
        """
        self._encoder, self._count = StepEncoder(), 0
        head = asdict(replace(self._episode, taken_over=len(taken_over), exchanges=()))
        del head["exchanges"]
        lines = [dump_json(head), *map(self._line, taken_over)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._path, sync=bool(taken_over)) as file:  # what is new is not synced either
                file.writelines(f"{line}\n".encode() for line in lines)
        except OSError as error:
            self._give_up(error)
        return not self._broken

    def append(self, request: LLMRequest, answer: LLMResponse) -> None:
        """Writes one more answer: it survives `kill -9` when this returns."""
        if self._broken:
            return
        line = self._line(Exchange(serialize_llm_request(request), answer))
        try:
            append_text(self._path, f"{line}\n")
        except OSError as error:
            self._give_up(error)

    def discard(self) -> None:
        """Removes the file."""
        self._broken = True
        self._path.unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        logger.warning("Episode %s cannot be resumed: %s: %s", self._episode.episode_id, self._path, error.strerror)

    def _line(self, exchange: Exchange) -> str:
        record = StepRecord(
            step_index=self._count,
            step_type="MID",
            observation=exchange.request,
            action=serialize_llm_response(exchange.answer),
            reward=None,
            discount=None,
            timestamp=0.0,
        )
        self._count += 1
        return dump_json(self._encoder.encode(record)[1])


def logged_episodes(folder: Path) -> list[LoggedEpisode]:
    """The logs of a run. Those whose first line is broken had no answer yet, and are left out. Blocking."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(LoggedEpisode.read(path))
        except (OSError, ValueError, RecursionError, StopIteration) as error:
            logger.warning("%s cannot be read, and is left alone: %s", path, error)
    return found


def _countable(answer: LLMResponse) -> LLMResponse:
    """The answer, if what it cost can be added up: the file may come from anybody."""
    if not is_countable(answer):
        raise ValueError("expected numbers of tokens and a cost")
    return answer


def _head(line: str) -> dict[str, Any]:
    kinds: dict[str, Any] = {
        "episode_id": str,
        "task_name": str,
        "attempt": int,
        "retry": int,
        "seed": int,
        "started_at": int | float,
        "parent": str | None,
        "taken_over": int,
    }
    head = json.loads(line)
    if not isinstance(head, dict) or head.keys() != kinds.keys():
        raise ValueError(f"expected the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        value = head[name]
        counts = isinstance(value, int | float) and name != "seed"
        if not isinstance(value, kind) or (counts and not 0 <= value < MAX_COUNT):
            raise ValueError(f"expected another kind of {name}, got {value!r:.80}")
    return head
