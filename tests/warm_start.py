"""A process that has imported the command line and forks for each command: `python -m ares_exp` without the imports.

A command runs as it does in a new interpreter: `ares_exp` is `__main__`, arguments, streams, directory and environment
are those of the client, a process that ends as the command does. Commands of one server have one hash seed, modules
that the server has imported are not looked for again, and what the grammars of Hydra have learned from one composition
is not learned again. A command ends without the interpreter's own clearing up. `warm_command` are words for a shell or
for `subprocess`, whose process stands between; in the place of the module there may be a script, and `-W` before it.
What gets signals is a `WarmProcess`. Tests of the start itself start a new interpreter. As a script, this file is the
server.
"""

import atexit
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

CLIENT = Path(__file__).with_name("warm_client.py")
LONGEST_REQUEST = 1 << 20
IMPORTED = (
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
    "dockerfile_parse",
    "jinja2",
    "openai.resources.chat.completions",
    "pathspec",
    "rich.console",
    "rich.table",
    "ares_exp.agents.shell_agent",
    "ares_exp.runs.run",
    "ares_exp.commands.cli.hydra_run",
    "ares_exp.commands.cli.main",
    "ares_exp.config.explain",
    "ares_exp.containers.local",
    "ares_exp.environments.harbor",
    "ares_exp.environments.twenty_questions",
    "ares_exp.policies.chat_completions",
    "ares_exp.policies.oracle",
    "ares_exp.policies.scripted",
    "ares_exp.runs.resume.compose_from_run",
    "ares_exp.runs.sweeps.sweep_report",
    "ares_exp.trajectories.collectors",
    "ares_exp.wrappers",
)
"""What nearly every command imports; nothing that draws random numbers or starts threads at import."""

WITH_DAYTONA = ("daytona._async.daytona", "daytona.handle.async_pty_handle")
"""What commands that use the service import besides: it takes them a second."""


class WarmStart:
    """The server, which imports the modules `also`, too; it ends with the process that started it, if not before."""

    def __init__(self, *also: str, python: str = sys.executable) -> None:
        self.address = f"\0ares_exp-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.address)
            listening.listen()
            self._server = subprocess.Popen(
                [python, __file__, str(listening.fileno()), *also],
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # as the commands have: a file could be sought, a terminal is buffered by lines
                stderr=subprocess.PIPE,
                cwd="/",
            )

    def close(self) -> None:
        self._server.communicate(timeout=10)


_started: dict[tuple[str, ...], WarmStart] = {}


def _server(also: Sequence[str], python: str = sys.executable) -> WarmStart:
    if (key := (python, *also)) not in _started:
        _started[key] = WarmStart(*also, python=python)
    return _started[key]


def warm_command(module: str = "ares_exp", also: Sequence[str] = (), python: str = sys.executable) -> tuple[str, ...]:
    """Returns the words that stand for `python -m MODULE` in the environment of this process; starts the server."""
    if sys.platform != "linux":
        return (python, "-m", module)
    return (sys.executable, "-I", "-S", str(CLIENT), _server(also, python).address[1:], module)


class WarmProcess:
    """A command in a fork, in a session of its own, as a `subprocess.Popen` of text; it ends with this process."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
        module: str = "ares_exp",
        also: Sequence[str] = (),
    ) -> None:
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(_server(also).address)
        with ExitStack() as ours:
            nothing = ours.enter_context(Path(os.devnull).open("r+"))

            def stream(wanted: int | IO[Any]) -> tuple[int, IO[str] | None]:
                if wanted == subprocess.DEVNULL:
                    return nothing.fileno(), None
                if wanted != subprocess.PIPE:
                    return wanted if isinstance(wanted, int) else wanted.fileno(), None
                reading, writing = os.pipe()
                ours.callback(os.close, writing)
                return writing, os.fdopen(reading)

            out, self.stdout = stream(stdout)
            err, self.stderr = (out, None) if stderr == subprocess.STDOUT else stream(stderr)
            request = module, list(words), str(cwd), dict(os.environ if env is None else env), True
            socket.send_fds(self._server, [marshal.dumps(request)], [nothing.fileno(), out, err])
            self.pid: int = marshal.loads(self._server.recv(100))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in filter(None, (self.stdout, self.stderr)):
            pipe.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = marshal.loads(self._server.recv(100))
            self._server.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("ares_exp", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Also raises `subprocess.TimeoutExpired` where another process holds its pipes."""
        until = None if timeout is None else time.monotonic() + timeout
        said: dict[IO[str], str] = {}
        readers = [
            threading.Thread(target=lambda pipe=pipe: said.update({pipe: pipe.read()}), daemon=True)
            for pipe in (self.stdout, self.stderr)
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if until is None else max(0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("ares_exp", timeout or 0)
        self.wait(None if until is None else max(0, until - time.monotonic()))
        for pipe in said:
            pipe.close()
        out, err = (said.get(pipe, "") if pipe is not None else "" for pipe in (self.stdout, self.stderr))
        return out, err


def end_warm_start() -> None:
    while _started:
        _started.popitem()[1].close()


def _serve(listening: socket.socket) -> str:
    """Returns in the process of each command, which is to run the module of that name."""
    del sys.path[0]  # the folder of this file
    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    _compose_once()
    gc.freeze()  # a command's own collections, and that at its end, would copy all of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        if 0 in select.select([listening, 0], [], [])[0]:
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            return _attend(connection)
        connection.close()


def _compose_once() -> None:
    """Composes the default config, and forgets it: what reads it has been imported and knows its grammars."""
    from ares_exp.config import hydra_setup, options

    hydra_setup.compose_config([])
    hydra_setup._composed.clear()
    options._installed.cache_clear()


def _attend(connection: socket.socket) -> str:
    """Starts a command, tells the client how it ended, and ends it when the client is gone; returns in the command."""
    request, streams, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
    if len(streams) < 3:
        os._exit(1)
    command = os.fork()
    if not command:
        return _become(request, streams, connection)
    for stream in (*streams, *range(3)):
        os.close(stream)
    ended = os.pidfd_open(command)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(command, signal.SIGKILL)
    _, status = os.waitpid(command, 0)
    with suppress(OSError):
        connection.send(marshal.dumps(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: bytes, streams: list[int], connection: socket.socket) -> str:
    """Takes over what the client has, and tells it which process this is."""
    module, arguments, directory, environment, has_session = marshal.loads(request)
    if has_session:
        os.setsid()
    connection.send(marshal.dumps(os.getpid()))
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:0] = [directory, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = arguments
    name: str = module
    if name == "-W":
        action, name, *sys.argv[1:] = arguments
        warnings.simplefilter(action)
    return name


def _end(code: int) -> None:
    """Ends this process as Python does, but takes nothing apart: all that it shares with the server would be copied."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _module = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        if _module.endswith(".py"):
            sys.argv[0] = _module
            runpy.run_path(_module, run_name="__main__")
        else:
            runpy.run_module(_module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            _end(end.code)
        raise
