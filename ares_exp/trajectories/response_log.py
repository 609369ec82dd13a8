"""The response log of a running episode, from which a resumed run continues the episode.

The log contains each request and its response. A response is written before it is passed to the agent, so that no paid
response is lost after `kill -9`. The folder `responses/` of the run contains one file per episode, independent of
collectors. The file is deleted when the attempt has a result.

Each line is a JSON object. The first line identifies the episode (see `LoggedEpisode`). Most other lines are exchanges,
encoded like a step (`step_encoding`): the request is the `observation`, and the response is the `action`. The `action`
is `null` if the environment reached its time limit before the response. In a task with several stages, `stage` is the
number of finished stages; it is omitted if it is 0. After the end of the episode, the last line contains the result
(`{"result": …}`). If the process dies before it adds the row of the episode to `episodes.jsonl`, this result becomes
the row.

If an agent sends several requests at the same time, only one of them is the current observation. The run may already
request the responses to the others. The line of such a prefetched response contains a number in the field `ahead`. A
later line such as `{"applied": 3}` means that the response with this number was used in the next exchange. If this
episode continues an earlier episode, prefetched responses from the earlier episode have `"taken_over": true`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ares_exp.errors import ConfigError, StorageError
from ares_exp.llms.request import LLMRequest, freeze
from ares_exp.llms.response import LLMResponse
from ares_exp.records.recorded_results import is_countable
from ares_exp.records.results import RESPONSES_USED_UP, EpisodeResult
from ares_exp.records.run_dir import append_text, atomic_file, dump_json
from ares_exp.records.run_storage import RunStorage
from ares_exp.records.validation import MAX_COUNT, Text, briefly, fields_of, validated
from ares_exp.trajectories.files.line_file import read_lines
from ares_exp.trajectories.files.step_encoding import StepDecoder, StepEncoder
from ares_exp.trajectories.recorded_responses import Exchange
from ares_exp.trajectories.records import (
    deserialize_llm_response,
    serialize_llm_request,
    serialize_llm_response,
)

SUFFIX = ".jsonl"
SCHEMA_VERSION = 3
Count = Annotated[int, Field(ge=0, lt=MAX_COUNT, strict=True)]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Head:
    """The first line of a response log, which identifies the episode. It also contains the schema version."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    episode_id: Text
    task_name: Text
    attempt: Count
    retry: Count
    seed: Annotated[int, Field(strict=True)]
    started_at: Annotated[float, Field(ge=0, lt=MAX_COUNT, strict=True)]
    parent: Text | None = None
    taken_over: Count = 0


@dataclass(frozen=True, slots=True)
class LoggedEpisode(_Head):
    """The content of a response log.

    Attributes:
        episode_id, task_name, attempt, retry, seed: Fields of the episode's `EpisodeResult`.
        started_at: Epoch seconds; 0.0 if the episode has not started, because its attempt waits for a retry.
        parent: Id of the earlier episode that this episode continues, if any.
        taken_over: Number of exchanges at the start of `exchanges` that come from the earlier episode.
        exchanges: Requests and responses in order, one for each time step.
        ahead: Exchanges with prefetched responses that have not been used yet.
        ahead_taken_over: All prefetched responses from the earlier episode, whether or not they have been used.
        result: Result of the episode; `None` if it has not ended.
    """

    exchanges: Sequence[Exchange] = field(default=(), repr=False)
    ahead: Sequence[Exchange] = field(default=(), repr=False)
    ahead_taken_over: Sequence[LLMResponse] = field(default=(), repr=False)
    result: EpisodeResult | None = None

    @property
    def has_started(self) -> bool:
        """Whether the episode was started. False if its attempt waits for a retry."""
        return self.started_at > 0

    @property
    def slot(self) -> tuple[str, int]:
        """Task name and number of the attempt. Together, they identify the attempt in a run."""
        return self.task_name, self.attempt

    @classmethod
    def read(cls, path: Path) -> LoggedEpisode:
        """Reads a log up to the first line that is incomplete or invalid, such as the last line of a killed process.

        Raises:
            OSError: The file cannot be read.
            ValueError: The first line cannot be read.
            ConfigError: The log has another schema version.
        """
        in_order: list[Exchange] = []
        waiting: dict[int, Exchange] = {}  # exchanges with unused prefetched responses, by number
        taken_over: list[LLMResponse] = []
        result: EpisodeResult | None = None
        decoder = StepDecoder()
        with read_lines(path) as lines:
            line = next(lines)
            head = _head(line.text, path)
            if head.episode_id != path.stem:
                raise ValueError(f"expected the log of {path.stem}, got the log of {head.episode_id!r:.80}")
            try:
                for line in lines:
                    data = json.loads(line.text)
                    if "result" in data:
                        result = _result(data["result"], head)
                        break
                    if "applied" in data:
                        in_order.append(waiting.pop(data["applied"]))
                        continue
                    exchange = _exchange(data, decoder)
                    if "ahead" not in data:
                        in_order.append(exchange)
                        continue
                    number = data["ahead"]
                    if type(number) is not int or exchange.response is None or number in waiting:
                        raise ValueError("expected a new number in `ahead`, and a response")
                    waiting[number] = exchange
                    if data.get("taken_over") is True:
                        taken_over.append(exchange.response)
            except Exception as error:
                logger.info("%s: only the lines before line %d are used (%s)", path, line.number, error)
        ahead = tuple(waiting.values())
        return cls(
            **asdict(head),
            exchanges=tuple(in_order),
            ahead=ahead,
            ahead_taken_over=tuple(taken_over),
            result=result,
        )


class ResponseLog:
    """Writes the log of one episode. If writing a line fails, the run ends (see `RunStorage.write`)."""

    def __init__(self, folder: Path, episode: LoggedEpisode, storage: RunStorage) -> None:
        """Creates the log of `episode`. `start` creates the file in `folder`."""
        self._storage = storage
        self._path = f"{folder}/{episode.episode_id}{SUFFIX}"
        self._exists = False
        self._episode = episode
        self._encoder = StepEncoder()
        self._ahead = 0
        self._discarded = False
        self._failure: StorageError | None = None

    @property
    def episode_id(self) -> str:
        """Id of the logged episode."""
        return self._episode.episode_id

    def start(self, taken_over: Sequence[Exchange], ahead: Sequence[Exchange] = ()) -> None:
        """Creates or replaces the file. Blocking.

        If this episode continues an earlier one, also writes the responses of the earlier one.

        Args:
            taken_over: Exchanges of the earlier episode, which are the first time steps of this episode.
            ahead: Exchanges with prefetched responses from the earlier episode. To use them, pass their numbers 0, 1, …
                to `apply`.

        Raises:
            StorageError: The file could not be written.
        """
        self._encoder, self._ahead, self._failure = StepEncoder(), len(ahead), None
        head = fields_of(self._episode, _Head) | {"taken_over": len(taken_over), "schema_version": SCHEMA_VERSION}
        lines = [dump_json(head), *map(self._line, taken_over)]
        lines += [self._line(one, ahead=number, taken_over=True) for number, one in enumerate(ahead)]
        text = "".join(f"{line}\n" for line in lines)
        self._storage.write(lambda: self._make(text, sync=bool(taken_over or ahead)), self._path)
        self._exists = True

    def _make(self, text: str, *, sync: bool) -> None:
        """Creates or replaces the file.

        A file that contains responses is written atomically and synced to disk, because it replaces the log of the
        earlier episode. Later lines are not synced.
        """
        if not sync:
            with suppress(FileExistsError):
                append_text(self._path, text, flags=os.O_CREAT | os.O_EXCL)
                return
        path = Path(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, sync=sync) as whole:
            whole.write(text.encode())

    def check(self) -> None:
        """Raises `StorageError` if logging would fail. Call it before a request, so that no paid response is lost."""
        self._storage.check()
        if self._exists and not os.path.exists(self._path):  # noqa: PTH110 - before each request
            raise self._storage.fail(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), self._path)

    def append(self, request: LLMRequest, response: LLMResponse | None, *, stage: int = 0) -> None:
        """Appends a request and its response, which then survive `kill -9`. Raises `StorageError` if this fails."""
        self._append(self._line(Exchange(serialize_llm_request(request), response, stage)))

    def append_ahead(self, request: LLMRequest, response: LLMResponse, *, stage: int = 0) -> int:
        """Appends a prefetched response like `append`. Returns its number for the later call of `apply`."""
        number = self._ahead
        self._ahead += 1
        self._append(self._line(Exchange(serialize_llm_request(request), response, stage), ahead=number))
        return number

    def apply(self, number: int) -> None:
        """Appends a line which states that prefetched response `number` is now the next exchange."""
        self._append(dump_json({"applied": number}))

    def end(self, row: str) -> None:
        """Appends the result of the episode. `row` is its row in `episodes.jsonl`, as JSON text."""
        self._append(f'{{"result": {row}}}')

    def read(self) -> LoggedEpisode | None:
        """Reads the file. Returns `None` if it was discarded or, after a warning, if it is unreadable. Blocking."""
        return _read(Path(self._path)) if not self._discarded else None

    def discard(self) -> None:
        """Removes the file of the log. Later writes do nothing."""
        self._discarded = True
        with suppress(FileNotFoundError):
            os.unlink(self._path)  # noqa: PTH108 - for each episode

    def _append(self, line: str) -> None:
        if self._discarded:
            return
        if self._failure is not None:  # a line is missing, and later lines would refer to it
            raise self._failure
        try:
            self._storage.write(lambda: append_text(self._path, f"{line}\n"), self._path)
        except StorageError as failure:
            self._failure = failure
            raise

    def _line(self, exchange: Exchange, **more: int) -> str:
        action = serialize_llm_response(exchange.response) if exchange.response is not None else None
        stage = {"stage": exchange.stage} if exchange.stage else {}
        return dump_json({**self._encoder.pack(exchange.request, action)[1], **stage, **more})


def logged_episodes(folder: Path) -> list[LoggedEpisode]:
    """Reads all logs in the folder of a run. A log with an invalid first line is skipped with a warning. Blocking."""
    read = map(_read, sorted(folder.glob(f"*{SUFFIX}")))
    return [episode for episode in read if episode is not None]


def _read(path: Path) -> LoggedEpisode | None:
    try:
        return LoggedEpisode.read(path)
    except (OSError, ValueError, RecursionError, StopIteration) as error:
        logger.warning("%s cannot be read, and is not changed: %s", path, error)
        return None


def _exchange(data: dict[str, Any], decoder: StepDecoder) -> Exchange:
    """Parses the line of an exchange. Raises an exception if the stage, token counts or cost are invalid."""
    (request, action), stage = decoder.unpack(data), data.get("stage", 0)
    response = deserialize_llm_response(freeze(action)) if action is not None else None
    if not isinstance(request, Mapping) or type(stage) is not int or not 0 <= stage < MAX_COUNT:
        raise ValueError("expected a request and a valid `stage`")
    if response is not None and not is_countable(response):
        raise ValueError("expected valid token counts and a valid cost")
    return Exchange(freeze(request), response, stage)


def _result(data: Any, head: _Head) -> EpisodeResult:
    """Parses the result. Raises an exception if it does not belong to the episode of the first line, `head`."""
    result = EpisodeResult.from_dict(data)
    if result.outcome not in RESPONSES_USED_UP or any(
        getattr(result, name) != getattr(head, name) for name in ("episode_id", "task_name", "attempt", "retry", "seed")
    ):
        raise ValueError("the result does not belong to this episode")
    return result


def _head(line: str, path: Path) -> _Head:
    data = json.loads(line)
    if isinstance(data, dict) and (version := data.pop("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {briefly(version)}. Resume the run with the "
            "version of ares_exp that wrote the file, or remove the file to request its responses again."
        )
    return validated(_Head, data)
