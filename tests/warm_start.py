"""A process that has imported the command line and forks for each command: `python -m ares_exp` without the imports.

What a command does is the same: a child runs `ares_exp` as `__main__` with the arguments, streams, directory and
environment of whoever asked, and ends as an interpreter does. Three things differ: the children of one server share its
hash seed, they are its children, and modules that are imported already are not looked for in the current directory.
Tests of the start itself, and of kills, start a new interpreter.
"""

from __future__ import annotations

import importlib
import os
import runpy
import select
import socket
import sys

IMPORTED = (
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
    "rich.table",
    "ares_exp.cli.attended_run",
    "ares_exp.cli.flags",
    "ares_exp.cli.hydra_callback",
    "ares_exp.cli.job",
    "ares_exp.cli.main",
    "ares_exp.config.explain",
    "ares_exp.containers.local.factory",
    "ares_exp.environments.harbor",
    "ares_exp.environments.twenty_questions",
    "ares_exp.resume.compose_from_run",
    "ares_exp.trajectories.commands.command_line",
)


def serve(listening: socket.socket) -> None:
    """Answers until the process that started this one is gone; returns in the process of a command, ready to run it."""
    while True:
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        command = os.fork()
        if not command:
            connection.close()
            become(request, streams)
            return
