"""An LLM server that is killed in the middle of the first requests, and comes back or does not."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.runs.control.status import RunStatus, read_status
from tests.conftest import Cli, rows
from tests.e2e.conftest import SUBMIT
from tests.leaks import wait_until
from tests.loopback_endpoint import completion
from tests.warm_start import WarmProcess

pytestmark = pytest.mark.local

SOON_SEC = 100.0
"""For a machine many times slower than one on which it takes some seconds."""

SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self, body={"data": []}):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        os.write(1, b"asked\\n")  # in one call, because two threads write
        if sys.argv[2] == "hangs":
            time.sleep(600)
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET(json.loads(sys.argv[3]))

    def log_message(self, *_): pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def serve(port: str, how: str) -> subprocess.Popen[str]:
    said = json.dumps(completion(SUBMIT))
    return subprocess.Popen([sys.executable, "-c", SERVER, port, how, said], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def paused(tmp_path: Path) -> Iterator[tuple[WarmProcess, str]]:
    """A run of 12 episodes, two at once, whose server was killed in the middle of the first requests; and its port."""
    with serve("0", "hangs") as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        words = f"policy=vllm policy.model=m policy.base_url=http://127.0.0.1:{port}/v1 policy.max_retries=2 attempts=2"
        run = WarmProcess([*words.split(), "tracker=none", "concurrency=2", "hydra.run.dir=run"], cwd=tmp_path)
        try:
            assert [server.stdout.readline() for _ in range(2)] == ["asked\n"] * 2
            server.kill()
            assert wait_until(lambda: (now := status(tmp_path)) is not None and now.outage, SOON_SEC)
            yield run, port
        finally:
            server.kill()
            run.kill()
            run.communicate()


def status(directory: Path) -> RunStatus | None:
    return read_status(directory / "run" / "status.json")


def test_restarted_server_gets_all_requests(paused: tuple[WarmProcess, str], tmp_path: Path, cli: Cli) -> None:
    run, port = paused
    shown = cli("ctl", "run", "status").stdout
    assert "pausing, 2 of at most 2 episodes running, 10 queued" in shown
    assert f"paused: GET http://127.0.0.1:{port}/v1/models failed: ConnectionRefusedError" in shown
    with serve(port, "answers") as server:
        out, err = run.communicate(timeout=SOON_SEC)
        server.kill()
    assert run.returncode == 0, err
    assert err.count("No episode starts until it responds.") == err.count("New episodes start again after") == 1
    assert "12 of 12 episodes finished" in out
    assert {row["outcome"] for row in rows(tmp_path / "run")} == {"completed"}


def test_interrupted_outage_resumes_every_episode(paused: tuple[WarmProcess, str], tmp_path: Path, cli: Cli) -> None:
    run, port = paused
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=SOON_SEC)
    assert run.returncode == 130, err
    assert "2 attempts interrupted\n  10 attempts never started" in out
    with serve(port, "answers") as server:
        resumed = cli("resume=run")
        server.kill()
    assert resumed.returncode == 0, resumed.stderr
    assert "12 of 12 episodes finished" in resumed.stdout
