"""The answer log: requests and answers of an episode under way, on disk before each answer is applied.

One file per episode in the run directory, independent of collectors: `kill -9` loses no answer that was paid for. It
is deleted when the attempt has its result; a resumed run continues with those that remain. Each line is a JSON object:
the first identifies the episode (`LoggedEpisode`), every other one is an encoded step (`step_encoding`) with a
request as its observation and the answer as its action: `null` if there was no answer before the environment's time
was up. In a task with several stages, `stage` is the number of finished ones, if any. After the end of the
episode, a last line has its result (`{"result": …}`), which becomes its row if its process dies before the row is
written. Older logs have none of these three: in them, a request without an answer has no line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.recorded_results import MAX_COUNT, checked_result, is_countable
from ares_exp.records.results import ANSWERS_USED_UP, EpisodeResult
from ares_exp.records.run_dir import append_text, atomic_file, dump_json
from ares_exp.records.validation import Text, explain_validation
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
    """A request, and what came of it.

    Attributes:
        request: As `serialize_llm_request` gives it.
        answer: The answer to it; `None`: there was none before the environment's time was up.
        stage: How many stages of the task were over.
    """

    request: Mapping[str, Any]
    answer: LLMResponse | None
    stage: int = 0


def answers(exchanges: Iterable[Exchange]) -> list[LLMResponse]:
    """Returns the answers of exchanges; an exchange may have none."""
    return [exchange.answer for exchange in exchanges if exchange.answer is not None]


@dataclass(frozen=True, slots=True)
class LoggedEpisode:
    """A logged episode, with its requests and answers.

    Attributes:
        episode_id, task_name, attempt, retry, seed: As in its `EpisodeResult`.
        started_at: Epoch seconds; 0.0 of one that has not begun: it waits for its retry.
        parent: The episode that it took the first answers over from, if it did.
        taken_over: How many exchanges these are.
        exchanges: What it was asked and answered, in order: one for each of its time steps.
        result: Its result, if it has ended.
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
    result: EpisodeResult | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the episode was started."""
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
        result: EpisodeResult | None = None
        decoder = StepDecoder()
        with read_lines(path) as lines:
            head = _head(next(lines).text)
            if head["episode_id"] != path.stem:
                raise ValueError(f"expected the log of {path.stem}, got that of {head['episode_id']!r:.80}")
            try:
                for line in lines:
                    data = json.loads(line.text)
                    if "result" in data:
                        result = _result(data["result"], head)
                        break
                    exchanges.append(_exchange(data, decoder))
            except Exception as error:
                logger.info("%s: used up to line %d (%s)", path, len(exchanges) + 1, error)
        return cls(**head, exchanges=tuple(exchanges), result=result)


class AnswerLog:
    """Writes the log of one episode. A log that cannot be written is reported once, and changes nothing else."""

    def __init__(self, folder: Path, episode: LoggedEpisode) -> None:
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
        head = asdict(replace(self._episode, taken_over=len(taken_over), exchanges=(), result=None))
        del head["exchanges"], head["result"]
        lines = [dump_json(head), *map(self._line, taken_over)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._path, sync=bool(taken_over)) as file:  # what is new is not synced either
                file.writelines(f"{line}\n".encode() for line in lines)
        except OSError as error:
            self._give_up(error)
        return not self._broken

    def append(self, request: LLMRequest, answer: LLMResponse | None, *, stage: int = 0) -> None:
        """Writes one more exchange: it survives `kill -9` when this returns."""
        if not self._broken:
            self._append(self._line(Exchange(serialize_llm_request(request), answer, stage)))

    def end(self, result: EpisodeResult) -> None:
        """Writes the result of the episode; it survives `kill -9` when this returns."""
        if not self._broken:
            self._append(dump_json({"result": result.to_dict()}))

    def discard(self) -> None:
        """Removes the file."""
        self._broken = True
        self._path.unlink(missing_ok=True)

    def _append(self, line: str) -> None:
        try:
            append_text(self._path, f"{line}\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        logger.warning("Episode %s cannot be resumed: %s: %s", self._episode.episode_id, self._path, error.strerror)

    def _line(self, exchange: Exchange) -> str:
        record = StepRecord(
            step_index=self._count,
            step_type="MID",
            observation=exchange.request,
            action=serialize_llm_response(exchange.answer) if exchange.answer is not None else None,
            reward=None,
            discount=None,
            timestamp=0.0,
        )
        self._count += 1
        stage = {"stage": exchange.stage} if exchange.stage else {}
        return dump_json({**self._encoder.encode(record)[1], **stage})


def logged_episodes(folder: Path) -> list[LoggedEpisode]:
    """Reads the logs of a run; those whose first line is broken had no answer yet, and are left out. Blocking."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(LoggedEpisode.read(path))
        except (OSError, ValueError, RecursionError, StopIteration) as error:
            logger.warning("%s cannot be read, and is left alone: %s", path, error)
    return found


def _exchange(data: dict[str, Any], decoder: StepDecoder) -> Exchange:
    """Reads one line; its numbers must add up, as the file may come from anybody."""
    record, stage = decoder.decode(data), data.get("stage", 0)
    answer = deserialize_llm_response(record.action) if record.action is not None else None
    if not isinstance(record.observation, Mapping) or type(stage) is not int or not 0 <= stage < MAX_COUNT:
        raise ValueError("expected a request and the number of a stage")
    if answer is not None and not is_countable(answer):
        raise ValueError("expected numbers of tokens and a cost")
    return Exchange(record.observation, answer, stage)


def _result(data: Any, head: Mapping[str, Any]) -> EpisodeResult:
    """Reads the result of the episode that the log belongs to."""
    result = checked_result(data)
    if result.outcome not in ANSWERS_USED_UP or any(
        getattr(result, name) != head[name] for name in ("episode_id", "task_name", "attempt", "retry", "seed")
    ):
        raise ValueError("expected the result of this episode")
    return result


Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]


class _Head(BaseModel):
    """The first line: which episode the log is of."""

    model_config = ConfigDict(strict=True, extra="forbid")

    episode_id: Text
    task_name: Text
    attempt: Count
    retry: Count
    seed: int
    started_at: Annotated[float, Field(ge=0, lt=MAX_COUNT)]
    parent: Text | None
    taken_over: Count


def _head(line: str) -> dict[str, Any]:
    try:
        return _Head.model_validate(json.loads(line)).model_dump()
    except ValidationError as error:
        raise ValueError(explain_validation(error)) from None
