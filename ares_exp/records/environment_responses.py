"""The record of calls to an environment's own models, such as a judge: `oracle.jsonl` in an episode's directory.

Each question is one line, which is written before the environment uses the response. If an episode is lost, the run
reads its usage from this record. If the attempt is run again, the run copies the responses to the new episode's record,
and marks them as `taken_over`. These responses are not requested again. The record is untrusted, so lines after an
invalid line are ignored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ares_exp.records.results import EnvironmentUsage
from ares_exp.records.run_dir import append_text, dump_json, open_regular
from ares_exp.records.validation import MAX_NUMBER, Count, Within

RECORD = "oracle.jsonl"
"""File name of the record in an episode's directory."""
MAX_BYTES = 32 * 2**20
"""Maximum number of bytes that are read from a record."""

_Answer = Annotated[str, Field(max_length=2_000)]
_Amount = Annotated[float, Within(0, MAX_NUMBER)]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question to an environment's own model, and the model's responses to it.

    Attributes:
        question: The question, such as a question from the policy to the oracle in twenty questions.
        said: Texts of the model's responses. There are several if the first ones could not be parsed.
        answer: The answer that was parsed from the last response; `None` if no response could be parsed.
        model: Name of the model; `None` if unknown.
        prompt_tokens, generated_tokens: Total tokens of all responses.
        cost: Total cost of all responses, in US dollars.
        sec: Time from the question to the answer, in seconds.
        taken_over: Whether the responses were copied from an earlier episode, which paid for them.
        scorer: Name of the scorer that asked the question; `None` if the environment asked it.
    """

    task: str
    question: str
    said: tuple[str, ...]
    answer: _Answer | None
    model: str | None
    prompt_tokens: Count
    generated_tokens: Count
    cost: _Amount
    sec: _Amount
    taken_over: bool = False
    scorer: str | None = None

    @property
    def usage(self) -> EnvironmentUsage:
        """The tokens and cost of the responses."""
        return EnvironmentUsage(self.prompt_tokens, self.generated_tokens, self.cost)


_ASKED = TypeAdapter(Asked)


def append_asked(files: Path, asked: Iterable[Asked]) -> None:
    """Appends questions to the record in the episode's directory `files`. Blocking.

    When this function returns, the questions are stored even if the process is then killed (`kill -9`).

    Raises:
        OSError: The disk is full, or another write error occurred. The record is unchanged.
    """
    path = files / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{key: value for key, value in asdict(one).items() if key != "scorer" or value is not None} for one in asked]
    append_text(path, "".join(f"{dump_json(row)}\n" for row in rows), flags=os.O_CREAT)


def read_asked(files: Path) -> list[Asked] | None:
    """Reads the record in the episode's directory `files`. Returns `None` if it is missing or unreadable. Blocking.

    An incomplete last line, which a killed process may leave, is ignored.
    """
    path = files / RECORD
    try:
        with open_regular(path) as file:
            *lines, _ = file.read(MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error)
        return None
    found: list[Asked] = []
    for line in lines:
        try:
            found.append(_ASKED.validate_json(line, strict=True))
        except ValidationError:
            logger.warning("%s: line %d is invalid. This line and all later lines are ignored.", path, len(found) + 1)
            break
    return found


def copy_responses(earlier: Path, own: Path, *, of_scorers: bool = False) -> None:
    """Copies answered questions from the record of an episode to the record of a new episode. Blocking.

    If `of_scorers` is set, copies only the questions of scorers. The environment's own questions are asked again,
    because their answers affect the episode's steps.
    """
    asked = [one for one in read_asked(earlier) or () if one.answer is not None and (one.scorer or not of_scorers)]
    if asked:
        append_asked(own, [replace(one, taken_over=True) for one in asked])


def recorded_usage(files: Path) -> EnvironmentUsage | None:
    """Sums tokens and cost of the responses that were not taken over; `None` if there is no record. Blocking."""
    asked = read_asked(files)
    if asked is None:
        return None
    return sum((one.usage for one in asked if not one.taken_over), EnvironmentUsage())
