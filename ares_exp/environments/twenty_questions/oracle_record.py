"""The record of an oracle: `oracle.jsonl` in the files of an episode, a line for each question that it was asked.

A line is on disk before its answer is applied. A try that goes on with an earlier one begins its record with the
answers of that one, and does not ask for them again. A record that is read may come from anybody: it is used up to the
first line that is none.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ares_exp.environments.twenty_questions.oracle_prompt import Answer
from ares_exp.recorded_results import MAX_COUNT, MAX_NUMBER
from ares_exp.results import EnvironmentUsage
from ares_exp.run_dir import append_text, dump_json, open_regular

RECORD = "oracle.jsonl"
"""In the files of an episode."""

MAX_BYTES = 32 * 2**20
"""So much of a record is read."""
MAX_SAID_CHARS = 2_000
"""So much is kept of each of the oracle's answers."""

_Answer = Annotated[str, Field(pattern="^(yes|no|unknown)$")]
_Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
_Amount = Annotated[float, Field(ge=0, lt=MAX_NUMBER)]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, and what came of it.

    Attributes:
        task: The name of what is hidden.
        question: As the policy asked it.
        said: The oracle's answers, of which the last one was read.
        answer: As what; `None`: there was none that can be read.
        model: Who answered, where that is known.
        prompt_tokens, generated_tokens: Of all its answers.
        cost: US dollars, likewise.
        sec: Seconds from the question to the answer.
        taken_over: Whether it was an earlier try that asked, and paid.
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

    @property
    def usage(self) -> EnvironmentUsage:
        """What was spent on it."""
        return EnvironmentUsage(self.prompt_tokens, self.generated_tokens, self.cost)


_ASKED = TypeAdapter(Asked)


def readable(text: str) -> str:
    """The text, with a `?` for each half of a surrogate pair, as a model may write it: no file could give it back."""
    return text.encode(errors="replace").decode()


class OracleRecord:
    """The record of one episode. What it does is blocking."""

    def __init__(self, files: Path) -> None:
        """Touches nothing.

        Args:
            files: The directory of the episode's files.
        """
        self._path = files / RECORD

    def append(self, *asked: Asked) -> None:
        """Writes lines: they survive `kill -9` when this returns. A full disk is reported, no more."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_text(self._path, "".join(f"{dump_json(asdict(one))}\n" for one in asked), flags=os.O_CREAT)
        except OSError as error:
            logger.warning("Writing %s failed: %s", self._path, error)

    def read(self) -> list[Asked]:
        """What there is of it. A last line without an end was being written when its process died."""
        try:
            with open_regular(self._path) as file:
                *lines, _ = file.read(MAX_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return []
        found: list[Asked] = []
        for line in lines:
            try:
                found.append(_ASKED.validate_json(line, strict=True))
            except ValidationError:
                logger.warning("%s is used up to its line %d: it is no answer of an oracle", self._path, len(found) + 1)
                break
        return found

    def take_over(self, earlier: OracleRecord) -> None:
        """Begins this record with what the earlier one has answers to."""
        if answered := [replace(one, taken_over=True) for one in earlier.read() if one.answer is not None]:
            self.append(*answered)

    def taken_over(self, task: str) -> dict[str, list[Answer]]:
        """The answers that need not be asked for again, by question, in order."""
        answers: dict[str, list[Answer]] = {}
        for one in self.read():
            if one.taken_over and one.task == task and one.answer is not None:
                answers.setdefault(one.question, []).append(Answer[one.answer.upper()])
        return answers

    def usage(self) -> EnvironmentUsage:
        """What was spent, without what was taken over."""
        return sum((one.usage for one in self.read() if not one.taken_over), EnvironmentUsage())
