r"""Encoding of journal entries as JSON lines, and validation and decoding of such lines.

```
{"t": "call", "id": 7, "k": "exec", "a": {"command": "ls"}}
{"t": "call", "id": 8, "k": "llm", "s": SETTINGS, "keep": 3, "m": [DIGEST, …]}
{"t": "done", "id": 7, "at": 1.25, "v": {"output": "a\n", "exit_code": 0, "duration_sec": 0.1}}
{"t": "done", "id": 8, "at": 1.27, "r": RESPONSE}
{"t": "done", "id": 9, "at": 1.31, "e": ["TimeoutError", ["too slow"]]}
{"t": "unheard", "id": 10, "r": RESPONSE}
{"t": "seed", "seed": 7}
{"t": "step", "id": 8, "time": 1790000000.5, "reward": 0.0, "sec": [0.5, 0.2, 0.1], "commands": [["ls", 0, 0.1, false]]}
```

The field `t` is the type of the entry, and `id` the number of the call. The other fields are:

- in calls: `k` (kind) and `a` (arguments). An LLM request has `keep` (number of leading messages that are the same as
  in the previous request), `m` (digests of the other messages) and `s` (digest of all other fields of the request).
- in results (`done`): `at` (seconds since the agent started) and either `e` (exception) or a value. `v` is the result
  of a command, `r` the response to an LLM request, `o` the output of a terminal (with `new` for a new terminal), `f`
  the files of a download, and `d` a digest of the files of an upload. Timers and threads have no value.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ares_exp import errors
from ares_exp.agents.runtime.journal import (
    CallEntry,
    CallKind,
    DoneEntry,
    Entry,
    Journal,
    SeedEntry,
    StepEntry,
    UnheardEntry,
)
from ares_exp.agents.runtime.replayed_calls import CallIdentities, RequestPrint
from ares_exp.containers.activity import CommandRecord
from ares_exp.containers.container import ExecResult, TerminalOutput
from ares_exp.errors import AresExpError, CaptureError, SnapshotMetadataError, SnapshotUnsupportedError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.run_dir import dump_json
from ares_exp.records.secrets import KnownSecrets
from ares_exp.trajectories.records import deserialize_llm_response, serialize_llm_response

MAX_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The content of a file or a directory that the agent has downloaded from its container to the host.

    Attributes:
        files: Relative path (empty for a single file), permission bits and content of each file. Symbolic links and
            empty directories are not included. `None` if the files are larger than `MAX_BYTES` in total.
    """

    files: tuple[tuple[str, int, bytes], ...] | None

    @classmethod
    def read(cls, path: Path) -> HostFiles:
        """Reads the files at `path`. Sets `files` to `None` if they are larger than `MAX_BYTES` in total. Blocks."""
        total, found = 0, []
        for one in [path] if path.is_file() else sorted(path.rglob("*")):
            if one.is_symlink() or not one.is_file():
                continue
            total += one.stat().st_size
            if total > MAX_BYTES:
                return cls(None)
            name = "" if one == path else str(one.relative_to(path))
            found.append((name, one.stat().st_mode & 0o777, one.read_bytes()))
        return cls(tuple(found))

    def to_keep(self) -> tuple[tuple[str, int, bytes], ...]:
        """Returns the files if the journal may store them.

        Raises:
            SnapshotUnsupportedError: The files were larger than `MAX_BYTES`.
            CaptureError: A file contains the value of a secret.
        """
        if self.files is None:
            raise SnapshotUnsupportedError(
                f"The agent downloaded more than {MAX_BYTES:,} bytes at once from its container. Such large downloads "
                "are not stored, so the agent's state cannot be restored. Make the agent read large files with "
                "commands in the container."
            )
        known = KnownSecrets()
        for name, _, data in self.files:
            if known.found_in(data):
                raise CaptureError(
                    f"The agent downloaded a file{f' {name!r}' if name else ''} that contains the value of a secret. "
                    "The file cannot be stored. Keep the secret out of the container."
                )
        return self.files

    def write(self, path: Path) -> None:
        """Writes the files to `path`. Raises `SnapshotUnsupportedError` if a file would be outside of `path`.

        Also raises the errors of `to_keep`.
        """
        for name, mode, data in self.to_keep():
            target = path / name if name else path
            if not target.resolve().is_relative_to(path.resolve()):
                raise SnapshotUnsupportedError(f"The name of a downloaded file points outside of {path}: {name!r}.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(mode)


def digest_of(path: Path) -> str:
    """Returns a digest of a file, or of the names and contents of the files in a directory. Blocks.

    Raises:
        OSError: A file cannot be read.
    """
    total = hashlib.sha256()
    for one in [path] if path.is_file() else sorted(path.rglob("*")):
        if one.is_file():
            with one.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{one.relative_to(path)}\0{content}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


MAX_ENTRIES = 1_000_000
MAX_MESSAGES = 30_000_000
"""Maximum total number of messages in all requests of a journal. An episode reaches it after about 5000 steps."""

_PYTHONS: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, NotImplementedError, EOFError),
    *(OSError, TimeoutError, FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError),
    *(NotADirectoryError, InterruptedError, BlockingIOError, ChildProcessError, ProcessLookupError),
    *(ConnectionError, ConnectionResetError, ConnectionRefusedError, ConnectionAbortedError, BrokenPipeError),
)
_OURS = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AresExpError))
_RAISABLE = {kind.__name__: kind for kind in (*_PYTHONS, *_OURS)}
"""Exceptions that a journal may contain as results of calls: common Python exceptions, and ares_exp's exceptions."""

_PLAIN = (str, int, float, bool, type(None))


@dataclass(slots=True)
class JournalEncoder:
    """Encodes a growing journal. Each call of `update` encodes only the entries since the previous call."""

    lines: list[bytes] = field(default_factory=list)
    _identities: CallIdentities = field(default_factory=CallIdentities)
    _last_request: tuple[str, ...] = ()
    _encoded: int = 0

    def update(self, journal: Journal) -> list[bytes]:
        """Returns all entries, one per line. Raises `SnapshotUnsupportedError` if a value cannot be encoded."""
        for entry in journal.entries[self._encoded :]:
            self.lines.append(dump_json(self._encode(entry)).encode())
            self._encoded += 1
        return self.lines

    def _encode(self, entry: Entry) -> dict[str, Any]:
        if isinstance(entry, CallEntry):
            call = {"t": "call", "id": entry.call_id, "k": entry.kind}
            if entry.kind == "llm":
                identity = (
                    entry.arguments
                    if isinstance(entry.arguments, RequestPrint)
                    else self._identities.of_request(entry.arguments)
                )
                last, messages = self._last_request, identity.messages
                keep = next((i for i, (a, b) in enumerate(zip(last, messages, strict=False)) if a != b), None)
                keep = min(len(last), len(messages)) if keep is None else keep
                self._last_request = messages
                return call | {"s": identity.settings, "keep": keep, "m": list(messages[keep:])}
            return call | {"a": self._identities.of(entry.kind, entry.arguments)}
        if isinstance(entry, DoneEntry):
            done = {"t": "done", "id": entry.call_id, "at": entry.at}
            return done | (_encode_value(entry.value) if entry.error is None else _encode_error(entry.error))
        if isinstance(entry, SeedEntry):
            return {"t": "seed", "seed": entry.seed}
        if isinstance(entry, UnheardEntry):
            return {"t": "unheard", "id": entry.call_id, "r": serialize_llm_response(entry.response)}
        seconds = [entry.policy_sec, entry.environment_sec, entry.container_sec]
        commands = [[c.command, c.exit_code, c.duration_sec, c.timed_out] for c in entry.commands]
        step = {"t": "step", "id": entry.call_id, "time": entry.timestamp, "reward": entry.reward, "sec": seconds}
        return step | ({"commands": commands} if commands else {})


def _encode_value(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, ExecResult):
        return {"v": asdict(value)}
    if isinstance(value, TerminalOutput):
        return {"o": value.text, **({"new": True} if value.is_new else {})}
    if isinstance(value, LLMResponse):
        return {"r": serialize_llm_response(value)}
    if isinstance(value, HostFiles):
        return {"f": [[name, mode, base64.b64encode(data).decode()] for name, mode, data in value.to_keep()]}
    if isinstance(value, str):
        return {"d": value}
    raise SnapshotUnsupportedError(f"A call of the agent returned a {type(value).__name__}, which cannot be recorded.")


def _encode_error(error: BaseException) -> dict[str, Any]:
    name, given = type(error).__name__, error.args
    if isinstance(error, OSError) and error.filename is not None:
        given = (*given[:2], str(error.filename))  # `args` does not include the file name
    if _RAISABLE.get(name) is not type(error) or not all(isinstance(one, _PLAIN) for one in given):
        raise SnapshotUnsupportedError(
            f"A call of the agent raised {type(error).__qualname__} ({error}), which cannot be recorded. Raise a "
            "ContainerError, TimeoutError, OSError or ValueError with simple arguments such as a text."
        )
    return {"e": [name, list(given)]}


def decode_journal(lines: Iterable[bytes], *, started_at: float, seed: int, where: str) -> Journal:
    """Decodes a journal from its lines.

    Raises:
        SnapshotMetadataError: A line is malformed (the message contains its number), or there are too many lines.
    """
    journal = Journal(started_at=started_at, seed=seed)
    decoder = _Decoder()
    for number, line in enumerate(lines):
        if number >= MAX_ENTRIES:
            raise SnapshotMetadataError(f"{where}: expected at most {MAX_ENTRIES} journal entries, found more.")
        try:
            journal.entries.append(decoder.decode(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError) as error:
            raise SnapshotMetadataError(
                f"{where}: entry {number} of the journal is invalid: {type(error).__name__}: {error}"
            ) from None
    return journal


class _Decoder:
    """Decodes one journal. Remembers the kind of each call, to check that its result has the matching type."""

    def __init__(self) -> None:
        self._kinds: dict[int, CallKind] = {}
        self._done: set[int] = set()
        self._last_request: tuple[str, ...] = ()
        self._messages = 0

    def decode(self, data: Mapping[str, Any]) -> Entry:
        kind = data["t"]
        if kind == "seed":
            return SeedEntry(_checked(data["seed"], int))
        call_id = _checked(data["id"], int)
        if kind == "call":
            return self._call(call_id, data)
        if call_id not in self._kinds:
            raise ValueError(f"there is no call {call_id} before this entry")
        if kind == "done":
            return self._completion(call_id, data)
        if kind == "unheard":
            return UnheardEntry(call_id, deserialize_llm_response(data["r"]))
        if kind != "step" or self._kinds[call_id] != "llm":
            raise ValueError(f"expected a known kind of entry, got {kind!r:.40}")
        policy_sec, environment_sec, container_sec = data["sec"]
        return StepEntry(
            call_id,
            timestamp=_number(data["time"]),
            reward=None if data["reward"] is None else _number(data["reward"]),
            policy_sec=None if policy_sec is None else _number(policy_sec),
            environment_sec=_number(environment_sec),
            container_sec=_number(container_sec),
            commands=tuple(_command(*one) for one in data.get("commands", ())),
        )

    def _call(self, call_id: int, data: Mapping[str, Any]) -> CallEntry:
        if call_id in self._kinds or call_id < 0:
            raise ValueError(f"the call number {call_id} is negative or not unique")
        kind = data["k"]
        if kind not in ("llm", "exec", "upload", "download", "terminal", "timer", "thread"):
            raise ValueError(f"unknown kind of call {kind!r:.40}")
        self._kinds[call_id] = kind
        if kind != "llm":
            return CallEntry(call_id, kind, data["a"])
        keep = _checked(data["keep"], int)
        self._messages += keep + len(data["m"])
        if not 0 <= keep <= len(self._last_request) or self._messages > MAX_MESSAGES:
            raise ValueError(f"keeps {keep} of {len(self._last_request)} messages; {self._messages} messages in all")
        new = tuple(_checked(one, str) for one in data["m"])
        self._last_request = (*self._last_request[:keep], *new)
        return CallEntry(call_id, kind, RequestPrint(_checked(data["s"], str), self._last_request))

    def _completion(self, call_id: int, data: Mapping[str, Any]) -> DoneEntry:
        if call_id in self._done:
            raise ValueError(f"call {call_id} is completed twice")
        self._done.add(call_id)
        at, kind = _number(data["at"]), self._kinds[call_id]
        if "e" in data:
            name, given = data["e"]
            return DoneEntry(call_id, at, error=_error(_checked(name, str), given))
        return DoneEntry(call_id, at, value=_value(kind, data))


def _value(kind: str, data: Mapping[str, Any]) -> Any:
    if kind == "exec":
        return _exec_result(**data["v"])
    if kind == "llm":
        return deserialize_llm_response(data["r"])
    if kind == "terminal":
        return TerminalOutput(_checked(data["o"], str), _checked(data.get("new", False), bool))
    if kind == "download":
        return HostFiles(
            tuple(
                (_checked(name, str), _checked(mode, int) & 0o777, base64.b64decode(text, validate=True))
                for name, mode, text in data["f"]
            )
        )
    return _checked(data["d"], str) if kind == "upload" else None


def _exec_result(
    output: Any, exit_code: Any, duration_sec: Any, timed_out: Any, elided_bytes: Any, stderr: Any
) -> ExecResult:
    return ExecResult(
        output=_checked(output, str),
        exit_code=None if exit_code is None else _checked(exit_code, int),
        duration_sec=_number(duration_sec),
        timed_out=_checked(timed_out, bool),
        elided_bytes=_checked(elided_bytes, int),
        stderr=None if stderr is None else _checked(stderr, str),
    )


def _error(name: str, given: list[Any]) -> Exception:
    if name not in _RAISABLE or not all(isinstance(one, _PLAIN) for one in given):
        raise ValueError(f"expected a known error with plain values, got {name!r:.60}")
    return _RAISABLE[name](*given)


def _command(command: Any, exit_code: Any, duration_sec: Any, timed_out: Any) -> CommandRecord:
    code = None if exit_code is None else _checked(exit_code, int)
    return CommandRecord(_checked(command, str), code, _number(duration_sec), _checked(timed_out, bool))


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.60}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r:.60}")
    return float(value)
