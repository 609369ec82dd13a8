"""A process that a launcher started: it ends with the sweep, and no later."""

import json
import subprocess
import sys
from pathlib import Path

from ares_exp.containers.ownership import owner_labels
from ares_exp.records.run_dir import STOP

WORKER = """
import json, signal, sys, threading
from pathlib import Path
from ares_exp.errors import SweepInterrupted
from ares_exp.runs.sweeps.interruption import JobProcess

process, told = JobProcess(json.loads(sys.argv[1])), []
with process.running(Path(sys.argv[2])):
    print("running", flush=True)
    sys.stdin.readline()
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    while not told:
        signal.pause()
print("told", flush=True)
try:
    with process.running(Path(sys.argv[2])):
        print("another")
except SweepInterrupted:
    print("interrupted", flush=True)
sys.stdin.readline()
"""


def test_interrupt_reaches_jobs_and_starts_no_more(tmp_path: Path) -> None:

    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(owner_labels()), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == "running\n"
        (tmp_path / STOP).touch()
        worker.stdin.write("listen\n")
        worker.stdin.flush()
        assert [worker.stdout.readline() for _ in range(2)] == ["told\n", "interrupted\n"]
    finally:
        worker.communicate("end\n", timeout=60)
    assert worker.returncode == 0
