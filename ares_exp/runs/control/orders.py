"""Orders, which are commands that a user sends to a run in progress, and the files that contain them.

An order is a small JSON file in the folder `control/` of the run directory. An order to all jobs of a sweep is in
`control/` of the sweep's folder. The run reads and removes the file, and records the outcome in `control.jsonl`. Every
user who can write to the directory can control the run. The run rejects all other files in `control/`.
"""

from __future__ import annotations

import getpass
import itertools
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import pydantic
from pydantic import Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, dump_json, open_regular, write_atomically
from ares_exp.records.terminal_text import one_line
from ares_exp.records.validation import explain_validation

MAX_BYTES = 64 * 2**10
MAX_PAUSE_SEC = 30 * 86_400.0
WATCHED = ".watched"
"""Name of a file in `control/` that a reader of `status.json` touches, so that the run writes it more often."""

Verb = Literal["pause", "resume", "set", "cancel", "stop"]
VERBS: tuple[Verb, ...] = get_args(Verb)

_Name = Annotated[str, Field(min_length=1, max_length=500)]
_Value = StrictBool | StrictInt | StrictFloat | Annotated[str, Field(max_length=1000)] | None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid"))
class Order:
    """An order for a run in progress.

    Attributes:
        id: Unique name of the order.
        verb: Action that is requested: `pause`, `resume`, `set`, `cancel` or `stop`.
        by: User and machine that sent the order (`user@machine`), as reported by the sender's process.
        at: Time when the order was sent, in epoch seconds.
        reason: Reason that the user gave, if any.
        what: Name of a task, or id of an episode, to cancel (only for `cancel`).
        now: Whether requests to the policy are also paused (only for `pause`).
        for_sec: Number of seconds after which the run resumes automatically (only for `pause`).
        values: Config keys with their new values (only for `set`).
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
            raise ValueError("`cancel` requires `what`, and no other command accepts it")
        if bool(self.values) != (self.verb == "set"):
            raise ValueError("`set` requires `values`, and no other command accepts them")
        if (self.now or self.for_sec is not None) and self.verb != "pause":
            raise ValueError("only `pause` accepts `now` and `for_sec`")
        return self

    @classmethod
    def new(cls, verb: Verb, **fields: Any) -> Self:
        """Creates an order that is sent by the current user. Raises `ConfigError` if a field is invalid."""
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a user id without a name
            user = str(os.getuid())
        by = f"{user}@{socket.gethostname()}"[:200]
        try:
            return cls(id=os.urandom(6).hex(), verb=verb, by=by, at=time.time(), **fields)
        except ValidationError as error:
            raise ConfigError(f"This command is invalid: {explain_validation(error)}.") from None

    @classmethod
    def parse(cls, data: bytes) -> Order:
        """Parses the JSON content of an order file. Raises `ValueError` with the reason if it is not a valid order."""
        try:
            return _ORDER.validate_json(data)
        except ValidationError as error:
            raise ValueError(explain_validation(error)) from None

    def __str__(self) -> str:
        words = [self.verb, *([self.what] if self.what is not None else [])]
        words += [f"{key}={value}" for key, value in self.values.items()]
        words += ["--now"] if self.now else []
        words += [f"--for {self.for_sec:g}s"] if self.for_sec is not None else []
        return " ".join(map(one_line, words))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are set, as a JSON-ready dict."""
        given = {key: value for key, value in asdict(self).items() if value not in (None, False, {})}
        return {key: value for key, value in given.items() if key != "schema_version"}

    def settled(self, outcome: str, says: str, *, uid: int | None = None) -> dict[str, Any]:
        """Returns this order and its outcome as a line for `control.jsonl`.

        `outcome` is `done`, `refused` or `failed`, and `says` describes the outcome in a sentence. `uid` is the user id
        of the owner of the order's file.
        """
        return {**self.to_dict(), "uid": uid, "outcome": outcome, "says": says, "settled_at": time.time()}


_ORDER = TypeAdapter(Order)


def write_order(folder: Path, order: Order) -> Path:
    """Sends an order to a run: writes it as a new file to `folder`, the run's or sweep's `control/`. Returns its path.

    Raises:
        ConfigError: The folder is a symbolic link, which is not trusted.
        OSError: The file cannot be written.
    """
    if folder.is_symlink():
        raise ConfigError(f"Expected {folder} to be a folder, but it is a link. Remove it.")
    folder.mkdir(exist_ok=True)
    path = folder / f"{int(order.at * 1e6):017d}-{order.id}.json"
    write_atomically(path, dump_json({"schema_version": order.schema_version, **order.to_dict()}) + "\n")
    return path


def watch(folder: Path) -> None:
    """Makes a run write `status.json` more often for the next 10 seconds, by creating or touching a file in `folder`.

    Has no effect if the run directory is not writable.
    """
    with suppress(OSError):
        if not folder.is_symlink():
            folder.mkdir(exist_ok=True)
            os.close(os.open(folder / WATCHED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))
            os.utime(folder / WATCHED, follow_symlinks=False)


MAX_TAKEN = 200
"""Maximum number of order files that one call of `Inbox.take` returns. The next call returns more files."""
MAX_LISTED = 5_000
WATCHED_SEC = 10.0


@dataclass(frozen=True, slots=True)
class OrderFile:
    """A file that was found in `control/`, or the stop file of a sweep, which acts as the order `stop`.

    If the file is not a valid order, `order` and `uid` are `None`, and `problem` is the reason. For a valid order,
    `uid` is the user id of the file's owner; `None` for the stop file.
    """

    name: str
    order: Order | None = None
    uid: int | None = None
    problem: str = ""


class Inbox:
    """Reads the order files in `control/`. Each file is read once, the oldest first.

    Links, pipes, and large or invalid files are returned with a reason and without an order. Files with a leading dot
    in their name are skipped, because another process may still be writing them.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        """Stores the arguments. Set `is_shared` if all jobs of a sweep read this folder, so that its files are kept."""
        self.folder = folder
        self._is_shared = is_shared
        self._known: set[str] = set()

    def take(self) -> list[OrderFile]:
        """Returns up to `MAX_TAKEN` files that were not returned before. Blocking."""
        try:
            directory = os.open(self.folder, DIRECTORY_FLAGS)
        except FileNotFoundError:
            return []
        except OSError as error:
            if self.folder.name in self._known:
                return []
            self._known.add(self.folder.name)
            return [OrderFile(self.folder.name, problem=f"it is not a folder: {error.strerror}")]
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in itertools.islice(entries, MAX_LISTED)]
            if len(names) < MAX_LISTED:
                self._known.intersection_update(names)
            new = sorted(name for name in names if name[0] != "." and name not in self._known)
            return [found for name in new[:MAX_TAKEN] if (found := self._take(directory, name)) is not None]
        finally:
            os.close(directory)

    def forget(self) -> None:
        """Discards all waiting orders without applying them, because they were sent to an earlier session. Blocking."""
        for _ in range(MAX_LISTED // MAX_TAKEN):
            if not self.take():
                return

    @property
    def is_watched(self) -> bool:
        """Whether another process is currently reading the run's `status.json`. Blocking."""
        with suppress(OSError):
            return time.time() - (self.folder / WATCHED).lstat().st_mtime < WATCHED_SEC
        return False

    def _take(self, directory: int, name: str) -> OrderFile | None:
        try:
            data, uid = _read(directory, name)
            found = OrderFile(name, Order.parse(data), uid)
        except FileNotFoundError:  # the author has removed the file
            return None
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            found = OrderFile(name, problem=problem or type(error).__name__)
        if self._is_shared or not _remove(directory, name):
            self._known.add(name)
        return found


def _read(directory: int, name: str) -> tuple[bytes, int]:
    """Reads a small regular file without following links. Returns its content and the user id of its owner."""
    if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise ValueError("expected a regular file")
    with open_regular(name, flags=os.O_NOFOLLOW, dir_fd=directory) as file:
        owner = os.fstat(file.fileno()).st_uid
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES:,} bytes")
    return data, owner


def _remove(directory: int, name: str) -> bool:
    for remove in (os.unlink, os.rmdir):
        with suppress(OSError):
            remove(name, dir_fd=directory)
            return True
    return False
