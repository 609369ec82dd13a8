"""A process that has imported the command line and forks for each command: `python -m ares_exp` without the imports.

A command runs as it does in a new interpreter: `ares_exp` is `__main__`, arguments, streams, directory and environment
are those of the client, a process that ends as the command does. Commands of one server have one hash seed, modules
that the server has imported are not looked for again, and what the grammars of Hydra have learned from one composition
is not learned again. A command ends without the interpreter's own clearing up. Tests of the start itself and those that
send signals start a new interpreter. As a script, this file is the server.
"""

from __future__ import annotations

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
import uuid
from contextlib import suppress
from pathlib import Path

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
    "ares_exp.cli.attended_run",
    "ares_exp.cli.flags",
    "ares_exp.cli.hydra_callback",
    "ares_exp.cli.job",
    "ares_exp.cli.main",
    "ares_exp.config.explain",
    "ares_exp.containers.local",
    "ares_exp.environments.harbor",
    "ares_exp.environments.twenty_questions",
    "ares_exp.policies.oracle",
    "ares_exp.policies.scripted",
    "ares_exp.resume.compose_from_run",
    "ares_exp.sweeps.report_text",
    "ares_exp.trajectories.collectors.json_collector",
    "ares_exp.wrappers",
)
"""What nearly every command imports; nothing that draws random numbers or starts threads at import."""


class WarmStart:
    """The server; it ends with the process that started it, if not before.

    Attributes:
        command: The words that stand for `python -m ares_exp`.
    """

    def __init__(self) -> None:
        address = f"ares_exp-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(f"\0{address}")
            listening.listen()
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # as the commands have: a file could be sought, a terminal is buffered by lines
                stderr=subprocess.PIPE,
                cwd="/",
            )
        self.command = (sys.executable, "-I", "-S", str(CLIENT), address)

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate(timeout=10)


_started: list[WarmStart] = []


def warm_command() -> tuple[str, ...]:
    """Returns the words that stand for `python -m ares_exp` in the environment of this process; starts the server."""
    if sys.platform != "linux":
        return (sys.executable, "-m", "ares_exp")
    if not _started:
        _started.append(WarmStart())
    return _started[0].command


def end_warm_start() -> None:
    """Ends the server, if there is one."""
    while _started:
        _started.pop().close()


def _serve(listening: socket.socket) -> None:
    """Returns in the process of each command, which is to run it."""
    del sys.path[0]  # the folder of this file
    for name in IMPORTED:
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
            _attend(connection)
            return
        connection.close()


def _compose_once() -> None:
    """Composes the default config, and forgets it: what reads it has been imported and knows its grammars."""
    from ares_exp.config import hydra_setup, plugins

    hydra_setup.compose_config([])
    hydra_setup._composed.clear()
    plugins._installed.cache_clear()


def _attend(connection: socket.socket) -> None:
    """Starts a command, tells the client how it ended, and ends it when the client is gone; returns in the command."""
    request, streams, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
    if len(streams) < 3:
        os._exit(1)
    command = os.fork()
    if not command:
        connection.close()
        _become(request, streams)
        return
    for stream in (*streams, *range(3)):
        os.close(stream)
    ended = os.pidfd_open(command)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(command, signal.SIGKILL)
    _, status = os.waitpid(command, 0)
    with suppress(OSError):
        connection.send(marshal.dumps(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: bytes, streams: list[int]) -> None:
    """Takes over what the client has."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments, directory, environment = marshal.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:0] = [directory, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = arguments


def _end(code: int) -> None:
    """Ends this process as Python does, but takes nothing apart: all that it shares with the server would be copied."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        runpy.run_module("ares_exp", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            _end(end.code)
        raise
