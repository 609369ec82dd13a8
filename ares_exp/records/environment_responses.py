"""The record of an environment's own model calls: `oracle.jsonl` in the files of an episode, a line per question.

An environment that makes model calls writes a line for each question before it applies the answer. From such a record
the runner reads a lost episode's usage, and it copies the answers into the record of the following try, whose
environment finds them there as `taken_over` and does not ask again. A record is untrusted: it is read up to the first
malformed line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ares_exp.records.recorded_results import MAX_COUNT, MAX_NUMBER
from ares_exp.records.results import EnvironmentUsage
from ares_exp.records.run_dir import append_text, dump_json, open_regular

RECORD = "oracle.jsonl"
"""Name of the record in the directory of an episode's files."""
MAX_BYTES = 32 * 2**20
"""Maximum number of bytes read of a record."""

_Answer = Annotated[str, Field(max_length=2_000)]
_Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
_Amount = Annotated[float, Field(ge=0, lt=MAX_NUMBER)]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and its answer.

    Attributes:
        task: Name of the task.
        question: The question, as the policy asked it.
        said: The texts that the model answered, of which the last one was read.
        answer: The answer that was read, in the environment's own terms; `None` when none could be.
        model: The model, where it is known.
        prompt_tokens, generated_tokens: Of all its answers.
        cost: US dollars, likewise.
        sec: Seconds from the question to the answer.
        taken_over: Whether an earlier try asked, and paid.
        scorer: Name of the scorer that asked, of a judge; `None`: the environment did.
    """

    task: str
    question: str
    said: tuple[str, ...]
    answer: _Answer | None
    model: str | None
    prompt_tokens: _Count
    generated_tokens: _Count
    cost: _Amount
    sec: _Amount
    taken_over: bool = False
    scorer: str | None = None

    @property
    def usage(self) -> EnvironmentUsage:
        """Tokens and cost of the question."""
        return EnvironmentUsage(self.prompt_tokens, self.generated_tokens, self.cost)


_ASKED = TypeAdapter(Asked)


def _to_dict(asked: Asked) -> dict[str, object]:
    return {key: value for key, value in asdict(asked).items() if key != "scorer" or value is not None}


def append_asked(files: Path, asked: Iterable[Asked]) -> None:
    """Writes lines, which survive `kill -9` when this returns. Blocking.

    Raises:
        OSError: The disk is full, or another failure; the record is unchanged.
    """
    path = files / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    append_text(path, "".join(f"{dump_json(_to_dict(one))}\n" for one in asked), flags=os.O_CREAT)


def read_asked(files: Path) -> list[Asked] | None:
    """Reads the record; `None` when there is none. Blocking.

    A last line without an end was being written when its process died, and does not count.
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
            logger.warning("%s is ignored from line %d on, which is not a recorded response", path, len(found) + 1)
            break
    return found


def copy_responses(earlier: Path, own: Path, *, of_scorers: bool = False) -> None:
    """Starts the record in the directory `own` with the answers in that of an earlier try. Blocking.

    Args:
        earlier: Directory of the earlier try's files.
        own: Directory of the files of the try that starts.
        of_scorers: Whether only answers to scorers are copied: those of a game decide how it goes on.
    """
    asked = [one for one in read_asked(earlier) or () if one.answer is not None and (one.scorer or not of_scorers)]
    if asked:
        append_asked(own, [replace(one, taken_over=True) for one in asked])


def recorded_usage(files: Path) -> EnvironmentUsage | None:
    """Adds up the record, without what was taken over; `None` when there is none. Blocking."""
    asked = read_asked(files)
    if asked is None:
        return None
    return sum((one.usage for one in asked if not one.taken_over), EnvironmentUsage())
