"""The command `view`: shows runs live on a page in a browser.

The command starts an HTTP server that only reads the files of runs. It does not slow down runs, and it also shows runs
that were killed or that run on another machine.

Other users of this machine can connect to the server, and web pages of other sites can make the browser send requests
to it. Each request must therefore contain a token, the server's own address as `Host`, and no `Origin` of another site.
The address that the command prints contains the token. The server then moves the token to a cookie, which browsers do
not send with requests of other sites.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import socketserver
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ares_exp.commands.cli.run_command import number_type
from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.records.latest_run import MEANING, OUTPUTS, run_path
from ares_exp.records.run_dir import RUN_FILES, RUN_FOLDERS, RunDir, is_run, is_sweep, json_text
from ares_exp.reports.page import page_foot, page_head, policy
from ares_exp.reports.run_payload import ShownRun, payload_of
from ares_exp.reports.summary import run_facts
from ares_exp.runs.control.status import read_status
from ares_exp.trajectories.stored_episodes import HeaderCache, runs_below

PORT = 7580
HOST = "127.0.0.1"
CONNECT = "'self'"
COOKIE = "ares_exp_view_{}"
"""Name of the cookie with the token. It contains the port, because browsers share cookies between ports of a host."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
IDLE_SEC = 30.0
"""Time limit in seconds of each read from and write to a client, so that idle clients are disconnected."""
MAX_DEPTH = 5
MAX_RUNS = 2_000
MAX_CACHED = 64
HELP = f"""\
Shows a run, or all runs below a folder, in the browser of this machine, with the page of `ares-exp report`. The page is
updated while a run continues. The command only reads files, so it also shows killed runs, and runs of other machines
on the same disk. Ctrl-C ends it.
[arguments]
Examples:
  %(prog)s                                  all runs below {OUTPUTS}/
  %(prog)s latest --open
  %(prog)s outputs/sweep --port 0

On another machine: `ssh -L {PORT}:127.0.0.1:{PORT} HOST`, then open the address that is printed there.

Exit codes: 0 ended by Ctrl-C; 2 the command line is wrong, or the port is in use.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=run_path,
        nargs="?",
        default=OUTPUTS,
        metavar="RUN|DIR",
        help=f"a run directory, or a folder of runs [{OUTPUTS}]; {MEANING}",
    )
    parser.add_argument(
        "--port",
        type=number_type(int, 0, 65535, "a port from 0 to 65535"),
        default=PORT,
        metavar="N",
        help=f"the port; 0 selects a free port [{PORT}]",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> None:
    with contextlib.suppress(KeyboardInterrupt), Server(Shelf(arguments.path), port=arguments.port) as server:
        sys.stdout.write(f"{server.address}\nThis page shows {arguments.path}, only on this machine. Ctrl-C ends it.\n")
        sys.stdout.flush()
        if arguments.open:
            webbrowser.open(server.address)
        server.serve_forever()


class Server(socketserver.ThreadingTCPServer):
    """The HTTP server for the runs at one path. It listens only on the loopback interface, from its creation on."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, shelf: Shelf, *, port: int) -> None:
        """Listens on `port`; 0 selects a free port. Raises `ConfigError` if the port is in use or not allowed."""
        try:
            super().__init__((HOST, port), _Request)
        except OSError as error:
            reason = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"Cannot listen on port {port}: {reason}. Choose another with `--port`.") from None
        self.shelf = shelf
        self.token = secrets.token_urlsafe(32)
        self.port: int = self.server_address[1]
        self.address = f"http://{HOST}:{self.port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of disconnected clients, for which the base class would print a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    """Handles one request. Only GET is supported; other methods are rejected."""

    server: Server
    server_version, sys_version = "ares-exp", ""
    timeout = IDLE_SEC

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        is_first = url.path == "/" and "token" in query
        cookies = dict(pair.strip().partition("=")[::2] for pair in self.headers.get("Cookie", "").split(";"))
        cookie = COOKIE.format(self.server.port)
        token = query["token"] if is_first else cookies.get(cookie, "")
        if (rejected := self._rejected(is_first=is_first)) is not None:
            self._send(*rejected)
        elif not secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self._send(401, "The token is missing or wrong. Open the address that `ares-exp view` printed.")
        elif is_first:  # moves the token from the address to a cookie
            set_cookie = f"{cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(303, "", {"Location": "/", "Set-Cookie": set_cookie})
        else:
            try:
                self._answer(url.path, query)
            except (ConfigError, TrajectoryFormatError) as error:
                self._send(422, str(error))
            except OSError as error:
                if error.filename is None:
                    raise
                self._send(422, f"{error.filename}: {error.strerror}")

    def _rejected(self, *, is_first: bool) -> tuple[int, str] | None:
        """Returns an HTTP status and a reason if another site may have caused the request, otherwise `None`."""
        hosts = [f"{name}:{self.server.port}" for name in (HOST, "localhost")]
        if self.headers.get_all("Host", []) not in [[host] for host in hosts]:
            return 421, f"Expected a request to the host {hosts[0]}."
        if self.headers.get("Origin") not in [None, *(f"http://{host}" for host in hosts)]:
            return 403, "Expected a request from this page, got a request from another origin."
        if self.headers.get("Sec-Fetch-Site") not in (None, "same-origin", "none") and not is_first:
            return 403, "Expected a request from this page, got a request from another site."
        return None

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        shelf = self.server.shelf
        if path == "/":
            page = page_head(f"ares-exp: {shelf.path}", connect=CONNECT) + page_foot(
                payload_of(shelf.summaries(), live=True)
            )
            self._send(200, page, content_type="text/html")
        elif path == "/api/runs":
            self._send_json(json_text({"runs": shelf.summaries()}))
        elif path not in ("/api/run", "/api/episode"):
            self._send(404, "There is no page at this address.")
        elif (run := shelf.run(query.get("run", ""))) is None:
            self._send(404, "The requested run does not exist.")
        elif path == "/api/run":
            self._send_json(run.text())
        else:
            try:
                found = run.episode_text(query.get("id", ""))
            except KeyError:
                self._send(404, "The requested episode has no trajectory.")
            else:
                self._send_json(found)

    def _send_json(self, text: str) -> None:
        """Sends data, or only the status 304 if the browser already has them, according to their entity tag."""
        tag = f'"{sha256(text.encode()).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, "", {"ETag": tag})
        else:
            self._send(200, text, {"ETag": tag}, content_type="application/json")

    def _send(
        self, status: int, text: str, headers: Mapping[str, str] | None = None, *, content_type: str = "text/plain"
    ) -> None:
        body = text.encode()
        security = f"{policy(connect=CONNECT)}; frame-ancestors 'none'"
        self.send_response(status)
        own = {"Content-Type": f"{content_type}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**HEADERS, "Content-Security-Policy": security, **own, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error as plain text. The base class calls this for malformed requests and unsupported methods."""
        self._send(code, message or "This request is not supported.")

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing. The base class would print a line for each request."""


Signature = tuple[tuple[str, int, int], ...]


class Shelf:
    """The runs to show: the run at a path, or the runs below it. Thread-safe."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"Expected a run directory or a folder of runs, got {path}.")
        self.path = path
        self._runs: dict[str, ShelvedRun] = {}
        self._lock = threading.Lock()

    def run(self, key: str) -> ShelvedRun | None:
        """Returns the run with the key `key`; `None` if there is no such run.

        The key is the path of the run: relative to the folder of runs, or unchanged if the shelf contains a single run.
        """
        if key not in self._runs:
            self._read()
        return self._runs.get(key)

    def summaries(self) -> list[dict[str, Any]]:
        """Returns the rows of all runs for the list of runs."""
        return [run.summary() for run in self._read()]

    def _read(self) -> list[ShelvedRun]:
        with self._lock:
            if is_run(self.path):
                found = {str(self.path): self.path}
            else:
                paths = islice(runs_below(self.path, MAX_DEPTH), MAX_RUNS)
                found = {str(path.relative_to(self.path)): path for path in paths}
            self._runs = {key: self._runs.get(key) or ShelvedRun(key, path) for key, path in found.items()}
            return [*self._runs.values()]


class ShelvedRun:
    """A run to show. Its data are cached, and read again when its files have changed."""

    def __init__(self, key: str, path: Path) -> None:
        self._key = key
        self._path = path
        self._headers = HeaderCache()
        self._lock = threading.Lock()
        self._cached: dict[str, tuple[Signature, Any]] = {}

    def summary(self) -> dict[str, Any]:
        """Returns the row of the run in a list of runs. If the run cannot be read, the row contains the error."""
        summary = self._current("summary", lambda: _summary(self._path), steps=False)
        return {"key": self._key, "name": self._key, "summary": summary}

    def text(self) -> str:
        """Returns the data of the run for the page, as JSON."""

        def make(shown: ShownRun) -> Mapping[str, Any]:
            status = read_status(shown.dir.status) if shown.state.name == "running" else None
            own = {"key": self._key, "status": asdict(status) if status is not None else None}
            return {**shown.payload(name=self._key), **own}

        return self._text("run", make)

    def episode_text(self, episode_id: str) -> str:
        """Returns an episode's JSON data for the page. Raises `KeyError` without a trajectory."""
        return self._text(f"episode {episode_id}", lambda shown: shown.episode(episode_id))

    def _text(self, name: str, make: Callable[[ShownRun], Mapping[str, Any]]) -> str:
        shown = ShownRun(self._path, headers=self._headers)
        return str(self._current(name, lambda: json_text(make(shown)), steps=True))

    def _current(self, name: str, make: Callable[[], Any], *, steps: bool) -> Any:
        """Returns the cached result of `make`, unless the run's files have changed since it was called."""
        with self._lock:
            signature = _signature(self._path, steps=steps)
            if name not in self._cached or self._cached[name][0] != signature:
                if len(self._cached) >= MAX_CACHED:
                    self._cached.clear()
                self._cached[name] = signature, make()
            return self._cached[name][1]


def _summary(path: Path) -> dict[str, Any]:
    try:
        shown = ShownRun(path)
        totals, state = shown.summary.to_dict(), shown.state
    except (ConfigError, OSError) as error:
        return {"state": f"unreadable: {error}"}
    kept = {name: totals[name] for name in ("planned", "finished", "scored", "mean_reward", "cost")}
    own = {"state": state.name, "started": state.started, "elapsed_sec": shown.elapsed_sec}
    sweep = path.parent.name if is_sweep(path.parent) else None
    return {**kept, **own, "sweep": sweep, "facts": run_facts(shown.dir)}


def _signature(path: Path, *, steps: bool) -> Signature:
    """Returns the sizes and times of the run's files, to detect changes. `steps` includes the trajectory files."""
    run = RunDir(path)
    files = [run.episodes, run.sessions, run.summary, run.results, run.log, run.config, run.status]
    files += [path / name for name in (*RUN_FILES, *RUN_FOLDERS)]
    if steps and run.trajectories.is_dir():
        with os.scandir(run.trajectories) as entries:
            files += [Path(entry.path) for entry in entries]
    is_written = int(is_run(path) and ShownRun(path).is_written)  # a killed run stops writing without changing a file
    stamps = []
    for file in files:
        with contextlib.suppress(OSError):
            found = file.stat()
            stamps.append((file.name, found.st_mtime_ns, found.st_size))
    return (("", is_written, 0), *sorted(stamps))
