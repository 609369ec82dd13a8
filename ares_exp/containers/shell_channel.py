"""A channel: a persistent shell in a container that runs one script after another.

The module also contains the source that the shell runs. It is POSIX `sh`, because the container may only have busybox.
To save time, the shell forks the process for the next script before the script arrives. The shell reports its state
with marks, which are special byte sequences in its output (see `MarkParser`). It prints `hello` once, and for each
script `ready`, `start` and an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ares_exp.containers.container import Shell, User
from ares_exp.errors import ContainerDiedError

EXEC_ID_VARIABLE = "ARES_EXEC"
"""Name of the environment variable with a command's id. The kill script uses it to find the command's processes."""

# The kernel limits one argument of exec() to 128 KiB; a longer command is sent as a here-document.
_MAX_ARGUMENT_BYTES = 100_000
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class ShellInfo:
    """The process number of a channel's shell (0 if unknown), and the path of bash (empty if the image has no bash)."""

    pid: int = 0
    bash: str = ""


# The script server: a loop that forks a process for each script in advance. The forked process is a shell in its own
# session, whose output goes through `cat`. It reads one script from the stream, and the script replaces it by the shell
# of the command. So the command has the same environment (including `BASH_ENV`), line numbers and traces as if it was
# started directly. `cat` ensures that the exit code follows all output of the command. The server continues only when
# no process has the pipe open any more, including background processes. It then reads a line with the key, and forks
# the next process. The line may be sent as soon as the script has started.
_SERVER = r"""{
_setsid=$(command -v setsid) _bash=$(command -v bash)
printf '\036KEY hello %s|%s\036' $$ "$_bash"
while IFS= read -r _line; do
  [ "$_line" = KEY ] || continue
  { (
    printf '\036KEY ready\036' >&3
    (exec ${_setsid:+"$_setsid"} sh) 2>&1
    printf '\036KEY %d\036' $?
  ) 2>/dev/null | cat 3>&-; } 3>&1
done
}
"""


def parse_number(word: str) -> int:
    """Parses a process number or an exit code from the container. Raises `ValueError` if it is not a small number."""
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"Expected a process number or an exit code, got {word[:40]!r}.")
    return int(word)


def check_arguments(command: str, cwd: str | None, env: Mapping[str, str]) -> None:
    """Raises `ValueError` for a NUL, a lone surrogate, or a variable name that is not an identifier."""
    for what, text in [("command", command), ("cwd", cwd or ""), *((f"env[{name!r}]", env[name]) for name in env)]:
        if "\0" in text:
            raise ValueError(f"Expected {what} without NUL characters, which cannot be passed to a process.")
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            found = text[error.start]
            raise ValueError(f"Expected {what} to be valid Unicode text, but it contains {found!r}.") from None
    for name in env:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(f"Expected an identifier as the name of an environment variable, got {name!r}.")


def command_script(
    key: str,
    info: ShellInfo,
    *,
    command: str,
    exec_id: str,
    cwd: str | None,
    stays: bool = False,
    env: Mapping[str, str],
    shell: Shell,
    stderr: int | None = None,
) -> str:
    """Returns a script that replaces its own process with `command`.

    Args:
        key: Secret key of the channel, which marks contain.
        info: Process number of the channel's shell, and the path of bash.
        command: Shell source text.
        exec_id: Random hex digits that identify the processes of the command.
        cwd: Working directory. `None`: the shell's own directory.
        stays: Whether the command starts in the shell's own directory if `cwd` cannot be entered. If this directory is
            `/`, or if `stays` is false, the script fails.
        env: Variables in addition to the shell's variables.
        shell: Shell that runs the command.
        stderr: Process number of a running `sink_script`, whose stdout receives the command's stderr. `None`: stderr is
            merged into stdout.
    """
    lines = []
    if stderr is not None:
        complaint = "{ echo 'cannot separate stderr: /proc is closed'; exit 126; }"
        lines.append(f"command exec 2>/proc/{stderr}/fd/1 || {complaint}")
    if cwd is not None:
        complaint = f"cannot change to the working directory {cwd!r}: missing, not a directory, or not accessible"
        refuse = f"{{ echo {shlex.quote(complaint)}; exit 126; }}"
        if stays:
            refuse = f"case $(pwd -P 2>/dev/null) in /) {refuse} ;; esac"
        lines.append(f"cd -- {shlex.quote(cwd if posixpath.isabs(cwd) else f'./{cwd}')} 2>/dev/null || {refuse}")
    lines += [*(f"export {name}={shlex.quote(env[name])}" for name in env), f"export {EXEC_ID_VARIABLE}={exec_id}"]
    program = "sh" if shell == "sh -c" or not info.bash else info.bash
    become = f"exec {shlex.quote(program)} {'-lc' if shell == 'bash -lc' else '-c'}"
    if len(command.encode("utf-8", "surrogateescape")) <= _MAX_ARGUMENT_BYTES:
        lines.append(f"{become} {shlex.quote(command)} </dev/null")
    else:  # the words of `eval` are expanded before its redirection closes the descriptor for the command
        lines.append(f"{become} 'eval \"$(cat <&3)\" 3<&-' </dev/null 3<<'{key}'\n{command}\n{key}")
    return _script(key, "; ".join(lines))  # a single line, so that the command's line numbers start at 1


def sink_script(*, key: str) -> str:
    """Returns a script that only waits. A command in another channel writes its stderr to the script's stdout.

    The script prints the mark `sink` with its process number, and ends when it reads the line `end`. The channel
    reports the end of the output when the script and all processes of the command have closed the stdout.
    """
    # A separate mark: while the shell prints `start` to descriptor 3, it is also the shell's stdout.
    wait = 'while read -r _line && [ "$_line" != end ]; do :; done'
    return _script(key, f"read -r _pid _ </proc/self/stat; printf '\\036{key} sink %s\\036' $_pid; {wait}")


def kill_script(exec_ids: Collection[str], pids: Collection[int], *, key: str) -> str:
    """Returns a script that kills all processes of the commands `exec_ids`, the processes `pids` and their descendants.

    The script first stops the processes with SIGSTOP until no new process appears. Then it sends SIGKILL until none is
    left. A process belongs to a command if its environment contains the command's id. A process without this id belongs
    to the command of its parent or session leader. The script uses only shell builtins, because it cannot fork if the
    container has reached its process limit. The exit code is 0 if no process is left.
    """
    pattern = "|".join(f"*{EXEC_ID_VARIABLE}={exec_id}*" for exec_id in sorted(exec_ids)) or "''"
    doomed = "".join(f"{pid} " for pid in sorted(pids))
    return _script(key, _KILL.replace("PATTERN", pattern).replace("PIDS", doomed))


def _script(key: str, body: str) -> str:
    """Returns `body` as one compound command, so that the shell reads all of it before it runs the first line."""
    return f"{{ printf '\\036{key} start %d\\036' $$ >&3; exec 3>&-; {body}\nexit; }}\n"


# Names start with "_" so that they do not overwrite a variable of the container.
_KILL = r"""{
_owned() {
  while IFS= read -r _line || [ -n "$_line" ]; do
    case $_line in PATTERN) return 0;; esac
  done <"/proc/$1/environ"
  return 1
}
_tree=' PIDS' _sessions=' PIDS' _round=0 _live=
for _pid in $_tree; do kill -STOP "$_pid"; done
while [ $_round -lt 50 ]; do
  _round=$((_round + 1)) _new= _live=
  for _dir in /proc/[0-9]*; do
    _pid=${_dir#/proc/}
    case $_pid in 1|$$) continue;; esac
    IFS= read -r _stat <"$_dir/stat" || continue
    set -- ${_stat##*) } # state, parent, process group, session
    case $1 in Z|X) continue;; esac
    case $_tree in
    *" $_pid "*) ;;
    *)
      case "$_tree|$_sessions" in *" $2 "*"|"*|*"|"*" $4 "*) ;; *) _owned "$_pid" || continue;; esac
      _tree="$_tree$_pid " _new=1
      [ "$4" != "$_pid" ] || _sessions="$_sessions$_pid "
      kill -STOP "$_pid"
      ;;
    esac
    _live="$_live $_pid"
  done
  [ -n "$_live" ] || break
  [ -n "$_new" ] || kill -KILL $_live
done
[ -z "$_live" ]
} 2>/dev/null"""


_MARK = b"\x1e"
_MAX_WORD_BYTES = 8192

_MAX_COMPLAINT = 500
# Usual bound on the time from the exit code until a channel is ready. If it takes longer, a background process has the
# channel's output open.
_SETTLE_SEC = 0.05
Script = Callable[[str, ShellInfo], str]
"""Function that receives the key and the shell of a channel, and returns the source of a script."""


class MarkParser:
    """Splits a channel's byte stream into the output of scripts and the channel's own marks, `RS key SP word RS`.

    A mark may arrive in several pieces. The parser keeps an incomplete mark and otherwise searches only new bytes,
    because searching all received bytes again would take quadratic time.
    """

    def __init__(self, key: str, sign: bytes = _MARK) -> None:
        """Creates a parser for marks that start and end with `sign`. Programs in the container do not know `key`."""
        self._sign = sign
        self._prefix = sign + key.encode() + b" "
        self._carry = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, str | None]]:
        """Yields pairs: some output, and the word of the mark that follows it. In the last pair, the word is `None`.

        Raises `ValueError` if a mark is too long, because the channel's shell does not print such marks.
        """
        data, self._carry = self._carry + data, b""
        while (start := data.find(self._prefix)) >= 0:
            word = start + len(self._prefix)
            end = data.find(self._sign, word)
            if end < 0:
                if len(data) - word > _MAX_WORD_BYTES:
                    raise ValueError("A mark in the output has no end.")
                self._carry = data[start:]
                yield data[:start], None
                return
            yield data[:start], data[word:end].decode("utf-8", "replace")
            data = data[end + 1 :]
        cut = data.rfind(self._sign, max(0, len(data) - len(self._prefix) + 1))
        if cut >= 0 and self._prefix.startswith(data[cut:]):
            data, self._carry = data[:cut], data[cut:]
        yield data, None


class BoundedOutput:
    """The first and the last `limit / 2` bytes of a stream. The bytes between them are dropped to bound the memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head_limit = limit - limit // 2
        self._kept = bytearray()
        self._total = 0

    @property
    def elided_bytes(self) -> int:
        """Number of bytes that were dropped between head and tail."""
        return max(0, self._total - self._limit)

    def add(self, data: bytes) -> None:
        self._total += len(data)
        self._kept += data
        if len(self._kept) > 2 * self._limit + 65536:  # rarely, so that the copying stays linear
            del self._kept[self._head_limit : self._tail_start]

    @property
    def _tail_start(self) -> int:
        return len(self._kept) - self._limit // 2

    def text(self, between: str = "") -> str:
        """Returns the output as text. `between` replaces the dropped bytes, and U+FFFD replaces invalid UTF-8."""
        if self._total <= self._limit:
            return self._kept.decode("utf-8", "replace")
        head, tail = self._kept[: self._head_limit], self._kept[self._tail_start :]
        return f"{head.decode('utf-8', 'replace')}{between}{tail.decode('utf-8', 'replace')}"


class StreamLostError(OSError):
    """The connection to a shell broke, but the shell may still run. The state of its command is unknown."""


class ChannelStream(Protocol):
    """The stdin (source text) and stdout of a running `sh`. Used on one event loop. Cancelling `read` loses no data."""

    async def read(self) -> bytes:
        """Returns the next bytes of the shell's stdout; `b""` at its end. Its stderr is discarded.

        Raises:
            StreamLostError: The connection broke although the shell may still run.
            OSError: The connection failed in another way. The caller handles this like the end of the stream.
        """

    async def write(self, data: bytes) -> None:
        """Sends `data` to the shell's stdin. Waits while its buffer is full. Raises `OSError` if that fails."""

    def close(self) -> None:
        """Closes the stream immediately. Kills the shell if closing does not end it. Idempotent, never raises."""


class ScriptRun:
    """The state of one script in a channel's shell.

    Attributes:
        output: Buffer for the script's output until its exit code.
        pid: Process number of the script, which the command keeps when it replaces the script; 0 before the start.
        sink: Future that gets the process number if the script is a `sink_script`.
        answered: Event that is set when the exit code has arrived or can no longer arrive.
        word: Exit code in decimal; empty while unknown.
    """

    def __init__(self, output: BoundedOutput) -> None:
        self.output = output
        self.pid = 0
        self.sink: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.answered = asyncio.Event()
        self.word = ""

    def answer(self, word: str = "") -> None:
        """Records the exit code `word` and wakes the callers that wait for it. `""`: no exit code will arrive."""
        if not self.answered.is_set():
            self.word = word
            self.answered.set()
            self.sink.cancel()


class Channel:
    """A persistent shell in the container, and the asyncio task that reads its output.

    Attributes:
        ready: Future that is done when the channel can take a script, or when the channel has closed (see `is_open`).
        run: Current script, or the previous script as long as the channel is not ready for the next one. `None`: the
            channel is ready.
        settling_until: Time (`time.monotonic()`) by which the channel is expected to be ready, after its script has
            ended.
        is_open: Whether the channel can run scripts.
        complaint: First characters of the output before the first script, which is the engine's error message if the
            shell could not start.
    """

    def __init__(self, stream: ChannelStream, user: User | None, on_change: Callable[[Channel], None]) -> None:
        self.user = user
        self.shell = ShellInfo()
        self.run: ScriptRun | None = None
        self.settling_until = 0.0
        self._lost: StreamLostError | None = None
        self.is_open = True
        self.complaint = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._key = secrets.token_hex(8)
        self._parser = MarkParser(self._key)
        self.stream = stream
        self._on_change = on_change
        self.listener = asyncio.create_task(self._listen())
        # A callback, not a `finally` in the task: a task that is cancelled before its first step never enters it.
        self.listener.add_done_callback(lambda _: self.close())

    def start(self, output: BoundedOutput) -> ScriptRun:
        """Marks a ready channel as busy. Returns the state of its next script, whose output goes to `output`."""
        self.ready = asyncio.get_running_loop().create_future()
        self.settling_until = 0.0
        self.run = ScriptRun(output)
        return self.run

    async def send(self, script: Script) -> None:
        """Sends the text that `script` returns to the shell: a new script, or input for the script that is running."""
        with contextlib.suppress(OSError):  # the listener sees the end of the stream
            await self.stream.write(script(self._key, self.shell).encode("utf-8", "surrogateescape"))

    async def execute(self, run: ScriptRun, script: Script, seconds: float | None) -> None:
        """Sends a script and waits at most `seconds` until its exit code is in `run`. `None`: waits without a limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.send(script)
                await run.answered.wait()

    def raise_if_lost(self) -> None:
        """Raises `ContainerDiedError` if the connection broke while the shell may still run."""
        if self._lost is not None:
            reason = self._lost.__cause__ or self._lost
            raise ContainerDiedError(f"The connection to a shell of the container broke. {reason}") from reason

    def close(self) -> None:
        """Closes the stream to the shell. Callers that wait for a script get no exit code. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self.listener.cancel()
        self.stream.close()
        if self.run is not None:
            self.run.answer()
        if not self.ready.done():
            self.ready.set_result(None)
        self._on_change(self)

    async def _listen(self) -> None:
        try:
            await self.stream.write(_SERVER.replace("KEY", self._key).encode())
            while data := await self.stream.read():
                for output, mark in self._parser.feed(data):
                    if output:
                        self._take_in(output)
                    if mark:
                        word, _, rest = mark.partition(" ")
                        self._note(word, rest)
                        if word in ("hello", "start"):  # not earlier: a shell reads ahead while it parses its source
                            await self.stream.write(f"{self._key}\n".encode())
        except StreamLostError as error:
            self._lost = error
        except (OSError, ValueError):
            pass  # like the end of the stream; after a malformed mark, something in the container knows the key

    def _take_in(self, output: bytes) -> None:
        if self.run is None:  # before the first script: the engine's message if the shell could not start
            self.complaint = (self.complaint + output.decode("utf-8", "replace"))[:_MAX_COMPLAINT].strip()
        elif self.run.pid and not self.run.word:
            self.run.output.add(output)

    def _note(self, word: str, rest: str) -> None:
        """Updates the channel's state for a mark of its shell. Raises `ValueError` for an unknown mark."""
        run = self.run
        if word == "hello":
            pid, _, bash = rest.partition("|")
            self.shell = ShellInfo(parse_number(pid) if pid else 0, bash)
        elif word == "ready":
            if run is not None:
                run.answer()
            self.run = None
            if not self.ready.done():
                self.ready.set_result(None)
            self._on_change(self)
        elif word == "start":
            if run is not None:
                run.pid = parse_number(rest)
        elif word == "sink":
            if run is not None and not run.sink.done():
                run.sink.set_result(parse_number(rest))
        elif run is None or not run.pid:
            self.close()  # the process forked for the next script has ended early (`pkill bash`)
        else:
            parse_number(word)
            self.settling_until = time.monotonic() + _SETTLE_SEC
            run.answer(word)
