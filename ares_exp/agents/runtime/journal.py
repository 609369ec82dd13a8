r"""The journal of one agent: all its calls, the results of these calls, and the time steps, in order.

A replay compares the calls of the agent with the recorded calls. In a snapshot, each entry is a JSON line:

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

import asyncio
import base64
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ares_exp import errors
from ares_exp.containers.activity import CommandRecord
from ares_exp.containers.container import ExecResult, TerminalOutput
from ares_exp.errors import AresExpError, CaptureError, DivergenceError, SnapshotMetadataError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.run_dir import dump_json
from ares_exp.records.secrets import KnownSecrets, mask_known_secrets
from ares_exp.trajectories.records import deserialize_llm_response, serialize_llm_response
from ares_exp.trajectories.request_diff import apart

CallKind = Literal["llm", "exec", "upload", "download", "terminal", "timer", "thread"]


@dataclass(frozen=True, slots=True)
class CallEntry:
    """A call from the agent, such as a command in the container or an LLM request.

    Attributes:
        call_id: Number of the call, starting at 0.
        kind: Kind of the call.
        arguments: Immutable arguments, which depend on the kind. `llm`: the `LLMRequest`; `exec`: the command and its
            options; `upload` and `download`: the path in the container; `terminal`: the keys, the seconds and the size;
            `timer`: the seconds; `thread`: the name of the function.
    """

    call_id: int
    kind: CallKind
    arguments: Any


@dataclass(frozen=True, slots=True)
class DoneEntry:
    """The result of a call. Its place in the journal shows when it was delivered to the agent.

    Attributes:
        call_id: Number of the call.
        at: Time of the delivery, in seconds since the agent started.
        value: Result, such as an `LLMResponse` or an `ExecResult`; `None` for timers and threads.
        error: Exception that the call raised; `None` if it returned a value.
    """

    call_id: int
    at: float
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A time step: the environment returned an LLM request of the agent as its observation.

    Attributes:
        call_id: Number of the LLM call.
        timestamp: Time in epoch seconds.
        reward: Reward of the time step; `None` for the first time step.
        policy_sec: Seconds that the policy needed to respond to the previous time step; `None` for the first time step.
        environment_sec: Duration of the time step in seconds.
        container_sec: Part of the duration that was spent in the container.
        commands: Commands that the agent ran during the time step.
    """

    call_id: int
    timestamp: float
    reward: float | None = None
    policy_sec: float | None = None
    environment_sec: float = 0.0
    container_sec: float = 0.0
    commands: tuple[CommandRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedEntry:
    """A change of the agent's random seed to `seed`. It marks the point at which a branch of the episode starts."""

    seed: int


@dataclass(frozen=True, slots=True)
class UnheardEntry:
    """A response from the policy that the agent did not get, because it had cancelled the call or its time was up."""

    call_id: int
    response: LLMResponse


Entry = CallEntry | DoneEntry | StepEntry | SeedEntry | UnheardEntry


@dataclass(slots=True)
class Journal:
    """The events of one agent so far. A replay of these events restores the agent.

    Attributes:
        started_at: Start time of the agent in epoch seconds.
        seed: Initial seed of the agent's random generators.
        entries: Entries in order.
    """

    started_at: float
    seed: int
    entries: list[Entry] = field(default_factory=list)

    def steps(self) -> Iterator[StepEntry]:
        """Returns an iterator over the time steps, in order."""
        return (entry for entry in self.entries if isinstance(entry, StepEntry))


@dataclass(slots=True, eq=False)
class Call:
    """A call from the agent, and the state of its execution.

    Attributes:
        call_id: Number in the journal.
        kind: Kind of the call.
        arguments: Arguments that identify the call; see `CallEntry`.
        perform: Function that executes the call on the outer event loop. `None` for an LLM call, which waits for its
            response.
        again: Function that a replay calls instead of `perform`. It takes the recorded value, and returns the value for
            the agent. With `None`, the agent gets the recorded value.
        future: Future that the agent awaits; `None` for a timer.
        handle: Handle to run when the timer expires; `None` for other calls.
        work: Task or timer that executes the call; `None` if the call is not being executed.
        is_open: Whether the agent waits for the call.
    """

    call_id: int
    kind: CallKind
    arguments: Any
    perform: Callable[[], Awaitable[Any]] | None = None
    again: Callable[[Any], Any] | None = None
    future: asyncio.Future[Any] | None = None
    handle: asyncio.TimerHandle | None = None
    work: asyncio.Task[Any] | asyncio.TimerHandle | None = None
    is_open: bool = False


# Comparison of calls


SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class RequestPrint:
    """The identity of an LLM request: a digest of each message, and one digest of all other fields."""

    settings: str
    messages: tuple[str, ...]


class CallIdentities:
    """Computes the identities of calls. A replay finds a recorded call by its identity, which equal calls share.

    The digests of messages are cached, because each request repeats the earlier messages.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, Any], ...], str] = {}
        self._known_objects: dict[int, tuple[Mapping[str, Any], str]] = {}

    def of(self, kind: CallKind, arguments: Any) -> Any:
        """Returns the identity of a call: a `RequestPrint` for an LLM request, JSON-ready data for other calls."""
        return self.of_request(arguments) if kind == "llm" else _plain(arguments)

    def of_request(self, request: LLMRequest) -> RequestPrint:
        """Returns the identity of an LLM request."""
        settings = {
            name: getattr(request, name)
            for name in request.__dataclass_fields__
            if name != "messages" and getattr(request, name) is not None
        }
        return RequestPrint(_digest(settings), tuple([self._of_message(message) for message in request.messages]))

    def _of_message(self, message: Mapping[str, Any]) -> str:
        known = self._known_objects.get(id(message))
        if known is not None and known[0] is message:
            return known[1]
        try:
            key = tuple(message.items())
            digest = self._known.get(key)
            if digest is None:
                digest = self._known[key] = _digest(message)
        except TypeError:  # content in parts is not hashable
            digest = _digest(message)
        self._known_objects[id(message)] = (message, digest)
        return digest

    def shown(self, kind: CallKind, arguments: Any) -> str:
        """Returns a short description of a new call for an error message."""
        if kind == "llm":
            last = arguments.messages[-1] if arguments.messages else None
            return f"an LLM request with {len(arguments.messages)} messages, the last {_masked(last)[:SHOWN_CHARS]}"
        return f"a call for {kind} {_masked(arguments)[:SHOWN_CHARS]}"

    def difference(
        self, expected: CallEntry, kind: CallKind, arguments: Any, original: LLMRequest | None = None
    ) -> str:
        """Returns a clause for an error message that describes how a new call differs from the `expected` call.

        A journal on disk contains only digests of requests. To show the text of the expected request, pass this request
        as `original`.
        """
        if expected.kind != kind:
            return f"expected {recorded(expected)} as in the recording, got {self.shown(kind, arguments)}"
        if kind != "llm":
            was, now = _apart(_text(expected.arguments), _masked(arguments))
            return f"expected a call for {kind} {was} as in the recording, got {now}"
        theirs, ours = expected.arguments.messages, self.of_request(arguments).messages
        at = next((i for i, (old, new) in enumerate(zip(theirs, ours, strict=False)) if old != new), None)
        if at is not None:
            now = _masked(arguments.messages[at])
            was, now = _apart(_masked(original.messages[at]), now) if original else ("", now[:SHOWN_CHARS])
            was = was and f"it was {was}, "
            return f"message {at + 1} of {len(ours)} of an LLM request differs from the recording: {was}now it is {now}"
        if len(theirs) != len(ours):
            return f"expected {recorded(expected)} as in the recording, got {self.shown(kind, arguments)}"
        return "the settings of an LLM request (system prompt, tools, sampling) differ from the recording"


def recorded(entry: CallEntry) -> str:
    """Returns a short description of a recorded call for an error message."""
    if isinstance(entry.arguments, RequestPrint):
        return f"an LLM request with {len(entry.arguments.messages)} messages"
    return f"a call for {entry.kind} {_text(entry.arguments)[:SHOWN_CHARS]}"


def _apart(was: str, now: str) -> tuple[str, str]:
    """Returns excerpts of two strings. They start shortly before the first difference between the strings."""
    start, was, now = apart(was, now, width=SHOWN_CHARS, before=SHOWN_CHARS // 4)
    dots = "…" if start else ""
    return f"{dots}{was}", f"{dots}{now}"


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(item) for item in data]
    if isinstance(data, bool | int | float) or data is None:
        return data
    return mask_known_secrets(str(data))


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)


def _masked(data: Any) -> str:
    return mask_known_secrets(_text(data))


def _digest(data: Any) -> str:
    return hashlib.sha256(_masked(data).encode(errors="surrogatepass")).hexdigest()[:16]


# Replay


class JournalReplay:
    """The position in a journal during a replay.

    Between two results in the journal, the agent may make the recorded calls in any order. For example, the
    functions `as_completed` and `wait` of asyncio store tasks in a set. Its order depends on memory addresses.

    Attributes:
        error: Error for the first call that differs from the journal; `None` if no call differs. It is not raised in
            the agent, because the agent might catch it.
        last_call: Number of the last call in the journal.
    """

    def __init__(self, entries: Sequence[Entry], originals: Mapping[int, LLMRequest] | None = None) -> None:
        """Starts at the first entry. `originals` contains recorded requests by call number, to quote them in errors."""
        self.error: DivergenceError | None = None
        self._entries = [entry for entry in entries if isinstance(entry, CallEntry | DoneEntry | SeedEntry)]
        self._position = 0
        self._burst: list[tuple[int, CallEntry]] = []
        self._identities = CallIdentities()
        self._originals = originals or {}
        self.last_call = max((entry.call_id for entry in self._entries if isinstance(entry, CallEntry)), default=-1)

    def match(self, kind: CallKind, arguments: Any) -> int | None:
        """Returns the number of the recorded call that matches a new call. Without a match, sets `error`."""
        if self.error is not None:
            return None
        identity = self._identities.of(kind, arguments)
        self._load_burst()
        for place, (_, entry) in enumerate(self._burst):
            if entry.kind == kind and entry.arguments == identity:
                del self._burst[place]
                return entry.call_id
        if not self._burst:
            self._fail(
                self._position,
                f"it made a call that is not in the recording: {self._identities.shown(kind, arguments)}",
            )
            return None
        alike = (one for one in self._burst if one[1].kind == kind)
        position, expected = next(alike, self._burst[0])
        original = self._originals.get(expected.call_id)
        self._fail(position, self._identities.difference(expected, kind, arguments, original))
        return None

    def next_event(self, *, finished: bool) -> DoneEntry | SeedEntry | None:
        """Returns the next result or change of the seed, or `None` at the end of the journal.

        `finished` is whether the agent has ended. It only affects the error message.

        Raises:
            DivergenceError: The agent has not made a recorded call, or has made a different call.
        """
        self._load_burst()
        if self.error is None and self._burst:
            position, entry = self._burst[0]
            does = "ended" if finished else "waited"
            self._fail(position, f"expected {recorded(entry)} as in the recording, but it {does} without this call")
        if self.error is not None:
            raise self.error
        if self._position == len(self._entries):
            return None
        event = self._entries[self._position]
        assert not isinstance(event, CallEntry)
        self._position += 1
        return event

    def given_up(self, entry: DoneEntry) -> DivergenceError:
        """Returns the error for a replayed agent that has cancelled a call whose result is recorded in the journal."""
        self._fail(self._position - 1, f"it cancelled call {entry.call_id}, but waited for it in the recording")
        assert self.error is not None
        return self.error

    def _load_burst(self) -> None:
        if self._burst:
            return
        while self._position < len(self._entries):
            entry = self._entries[self._position]
            if not isinstance(entry, CallEntry):
                break
            self._burst.append((self._position, entry))
            self._position += 1

    def _fail(self, position: int, why: str) -> None:
        asked = {e.call_id for e in self._entries if isinstance(e, CallEntry) and e.kind == "llm"}
        responses = sum(isinstance(e, DoneEntry) and e.call_id in asked for e in self._entries[:position])
        self.error = DivergenceError(
            f"The replayed agent differs from its recording after {responses} LLM responses (entry {position} "
            f"of {len(self._entries)} of its journal): {why}. A replayable agent may depend only on its container, its "
            "LLM, asyncio, and the functions of the modules `time`, `random` and `uuid`. It must not depend on object "
            "ids, the order of sets, datetime.now(), os.urandom or files of the host.",
            step=responses,
            entry=position,
            why=why,
        )


# Files that the agent downloads or uploads


MAX_BYTES = 1024 * 1024
"""Maximum total size of the files of one download that a journal can store."""


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


# Encoding


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
