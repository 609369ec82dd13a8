"""Orders to a running run: what each may contain, and the files that carry them.

An order is a small JSON file in `control/` of the run directory, or of the sweep's folder for all its jobs. It is
written atomically. The run takes it, removes it, and records its outcome in `control.jsonl`. Every user who may write
in the directory may control the run. The run rejects everything else that it finds there.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import pydantic
from pydantic import Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.records.terminal_text import one_line
from ares_exp.records.validation import explain_validation

MAX_BYTES = 64 * 2**10
MAX_PAUSE_SEC = 30 * 86_400.0
WATCHED = ".watched"
"""Name of the file in `control/` that readers of the state touch. The run then writes its state more often."""

Verb = Literal["pause", "resume", "set", "cancel", "stop"]
VERBS: tuple[Verb, ...] = get_args(Verb)

_Name = Annotated[str, Field(min_length=1, max_length=500)]
_Value = StrictBool | StrictInt | StrictFloat | Annotated[str, Field(max_length=1000)] | None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid"))
class Order:
    """An order.

    Attributes:
        id: A unique name.
        verb: The action.
        by: User and machine of the author, as they report themselves.
        at: Time of the order, in epoch seconds.
        reason: The author's reason.
        what: `cancel`: the task or the episode.
        now: `pause`: whether requests to the policy wait, too.
        for_sec: `pause`: seconds after which the run resumes by itself.
        values: `set`: keys with their new values.
        schema_version: Version of the format.
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    verb: Verb
    by: Annotated[str, Field(max_length=200)]
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    reason: Annotated[str, Field(max_length=1000)] | None = None
    what: _Name | None = None
    now: StrictBool = False
    for_sec: Annotated[float, Field(gt=0, le=MAX_PAUSE_SEC, allow_inf_nan=False)] | None = None
    values: Annotated[dict[_Name, _Value], Field(max_length=50)] = Field(default_factory=dict)
    schema_version: Literal[1] = 1

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if (self.what is not None) != (self.verb == "cancel"):
            raise ValueError("expected `what` with `cancel`, and only with it")
        if bool(self.values) != (self.verb == "set"):
            raise ValueError("expected `values` with `set`, and only with it")
        if (self.now or self.for_sec is not None) and self.verb != "pause":
            raise ValueError("expected `now` and `for_sec` only with `pause`")
        return self

    @classmethod
    def new(cls, verb: Verb, **fields: Any) -> Self:
        """Makes an order by the user of this process.

        Raises:
            ConfigError: The fields do not fit the verb.
        """
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # an id without a name
            user = str(os.getuid())
        by = f"{user}@{socket.gethostname()}"[:200]
        try:
            return cls(id=os.urandom(6).hex(), verb=verb, by=by, at=time.time(), **fields)
        except ValidationError as error:
            raise ConfigError(f"This order is not valid: {explain_validation(error)}.") from None

    @classmethod
    def parse(cls, data: bytes) -> Order:
        """Reads an order.

        Raises:
            ValueError: The data is not an order; the message has the reason.
        """
        try:
            return _ORDER.validate_json(data)
        except ValidationError as error:
            raise ValueError(explain_validation(error)) from None

    def __str__(self) -> str:
        """Formats the order in one line."""
        words = [self.verb, *([self.what] if self.what is not None else [])]
        words += [f"{key}={value}" for key, value in self.values.items()]
        words += ["--now"] if self.now else []
        words += [f"--for {self.for_sec:g}s"] if self.for_sec is not None else []
        return " ".join(map(one_line, words))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are set, JSON-ready."""
        given = {key: value for key, value in asdict(self).items() if value not in (None, False, {})}
        return {key: value for key, value in given.items() if key != "schema_version"}

    def settled(self, outcome: str, says: str, *, uid: int | None = None) -> dict[str, Any]:
        """Returns the line of `control.jsonl` about this order.

        Args:
            outcome: `done`, `refused` or `failed`.
            says: The outcome in a sentence.
            uid: Owner of the file that carried the order, as the file system reports it.
        """
        return {**self.to_dict(), "uid": uid, "outcome": outcome, "says": says, "settled_at": time.time()}


_ORDER = TypeAdapter(Order)


def write_order(folder: Path, order: Order) -> Path:
    """Writes an order for a run.

    Args:
        folder: `control/` of the run or of the sweep; made if it is missing.
        order: The order.

    Raises:
        ConfigError: The folder is a link, which may lead anywhere.
        OSError: The file cannot be written.
    """
    if folder.is_symlink():
        raise ConfigError(f"Expected {folder} to be a folder, but it is a link. Remove it.")
    folder.mkdir(exist_ok=True)
    path = folder / f"{int(order.at * 1e6):017d}-{order.id}.json"
    write_atomically(path, dump_json({"schema_version": order.schema_version, **order.to_dict()}) + "\n")
    return path


def watch(folder: Path) -> None:
    """Makes a run write its state more often for a while, if this process may write in its directory."""
    with suppress(OSError):
        if not folder.is_symlink():
            folder.mkdir(exist_ok=True)
            os.close(os.open(folder / WATCHED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))
            os.utime(folder / WATCHED, follow_symlinks=False)
