"""Orders to a run under way: what each may say, and the files that carry them.

An order is a small JSON file in `control/` of the run directory, or of the sweep's folder for all its jobs. It is
written whole or not at all; the run takes it, removes it, and notes in `control.jsonl` what came of it. Who may write
in the directory may control the run. Whatever else lies there is refused.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.records.validation import explain_validation

SUFFIX = ".json"
MAX_BYTES = 64 * 2**10
MAX_HOLD_SEC = 30 * 86_400.0
LOOK = ".look"
"""Name of the file in `control/` that those touch who look at the state of a run: it then tells it more often."""

Verb = Literal["pause", "resume", "set", "cancel", "retry", "snapshot", "stop"]
VERBS: tuple[Verb, ...] = ("pause", "resume", "set", "cancel", "retry", "snapshot", "stop")
OF_EPISODES = ("cancel", "retry", "snapshot")
"""Orders that name a task or an episode."""

SNAPSHOT_TAKEN = "Snapshot {} is taken."
"""What is noted of `snapshot`."""

_Name = Annotated[str, Field(min_length=1, max_length=500)]
_Value = StrictBool | StrictInt | StrictFloat | Annotated[str, Field(max_length=1000)] | None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid"))
class Order:
    """An order.

    Attributes:
        id: Unique.
        verb: What to do.
        by: Who asks: user and machine, as they say themselves.
        at: When it was given, in epoch seconds.
        reason: Why.
        what: Of `cancel`, `retry` and `snapshot`: the task or the episode.
        now: Of `pause`: whether the policy is asked for nothing more, too.
        for_sec: Of `pause`: seconds after which the run resumes by itself.
        verify: Of `cancel`: whether the episodes are ended and scored on what there is.
        values: Of `set`: keys with their new values.
        schema_version: Of the format.
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    verb: Verb
    by: Annotated[str, Field(max_length=200)]
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    reason: Annotated[str, Field(max_length=1000)] | None = None
    what: _Name | None = None
    now: StrictBool = False
    for_sec: Annotated[float, Field(gt=0, le=MAX_HOLD_SEC, allow_inf_nan=False)] | None = None
    verify: StrictBool = False
    values: Annotated[dict[_Name, _Value], Field(max_length=50)] = Field(default_factory=dict)
    schema_version: Literal[1] = 1

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if (self.what is not None) != (self.verb in OF_EPISODES):
            raise ValueError(f"expected `what` of {', '.join(OF_EPISODES)} alone, of these always")
        if bool(self.values) != (self.verb == "set"):
            raise ValueError("expected `values` of `set` alone, of it always")
        if (self.now or self.for_sec is not None) and self.verb != "pause":
            raise ValueError("expected `now` and `for_sec` of `pause` alone")
        if self.verify and self.verb != "cancel":
            raise ValueError("expected `verify` of `cancel` alone")
        return self

    @classmethod
    def made(cls, verb: Verb, **more: Any) -> Self:
        """Makes an order of the user of this process, given now.

        Raises:
            ConfigError: It makes no sense.
        """
        try:
            return cls(id=os.urandom(6).hex(), verb=verb, by=who(), at=time.time(), **more)
        except ValidationError as error:
            raise ConfigError(f"There is no such order: {explain_validation(error)}.") from None

    def asked(self) -> dict[str, Any]:
        """Returns what is asked, JSON-ready, without what is not said."""
        said = {key: value for key, value in asdict(self).items() if value not in (None, False, {})}
        return {key: value for key, value in said.items() if key != "schema_version"}


_ORDER = TypeAdapter(Order)


def who() -> str:
    """Returns the user and the machine of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an id without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def parse(data: bytes) -> Order:
    """Reads an order.

    Raises:
        ValueError: It is none; with the reason.
    """
    try:
        return _ORDER.validate_json(data)
    except ValidationError as error:
        raise ValueError(explain_validation(error)) from None


def give(folder: Path, order: Order) -> Path:
    """Writes an order for a run.

    Args:
        folder: `control/` of the run or of the sweep; made where it is missing.
        order: What to do.

    Raises:
        ConfigError: The folder is a link: it may lead anywhere.
        OSError: It cannot be written.
    """
    if folder.is_symlink():
        raise ConfigError(f"Expected {folder} to be a folder, but it is a link. Remove it.")
    folder.mkdir(exist_ok=True)
    path = folder / f"{int(order.at * 1e6):017d}-{order.id}{SUFFIX}"
    write_atomically(path, dump_json({"schema_version": order.schema_version, **order.asked()}) + "\n")
    return path


def look(folder: Path) -> None:
    """Has a run tell its state more often for a while, where this process may write."""
    try:
        if not folder.is_symlink():
            folder.mkdir(exist_ok=True)
            os.close(os.open(folder / LOOK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))
            os.utime(folder / LOOK, follow_symlinks=False)
    except OSError:  # it is told less often then
        return


def record(order: Order, outcome: str, says: str, *, uid: int | None, at: float) -> Mapping[str, Any]:
    """Returns a line of `control.jsonl`: an order and its outcome.

    Args:
        order: The order.
        outcome: `done`, `refused` or `failed`.
        says: In a sentence.
        uid: Owner of the file that carried it, as the file system says.
        at: When that was known, in epoch seconds.
    """
    return {**order.asked(), "uid": uid, "outcome": outcome, "says": says, "settled_at": at}
