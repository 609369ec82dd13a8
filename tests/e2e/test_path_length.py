"""How long the path of one exchange is: one request of the shell agent, its response and its command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_CALLS = 250
"""Calls of functions of the package for one exchange. They vary by a few: output arrives in one piece or in two."""

MOST_FILES = 270
"""Files of the package that run for three exchanges."""

TRACED = """
import json, os, sys, threading
import ares_exp
from ares_exp.commands.cli.main import main

root = os.path.dirname(ares_exp.__file__) + os.sep
calls, files, status = 0, set(), None
COROUTINES = 0x2A0  # generators, coroutines and asynchronous generators

def profile(frame, event, arg):
    global calls
    code = frame.f_code
    if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(root):
        return
    if frame.f_lasti >= 0 and code.co_flags & COROUTINES and code.co_code[frame.f_lasti + 1] & 3:
        return  # it continues
    calls += 1
    files.add(code.co_filename)

threading.setprofile(profile)
sys.setprofile(profile)
try:
    main()
except SystemExit as end:
    status = end.code
sys.setprofile(None)
threading.setprofile(None)
with open(os.environ["COUNTED"], "w") as file:
    json.dump({"status": status, "calls": calls, "files": len(files)}, file)
"""


def counted(exchanges: int, folder: Path) -> dict[str, int]:
    """Runs one bundled task with so many exchanges, and counts calls and files."""
    words = [*(str(number) for number in range(exchanges - 1)), "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    replies = ",".join(f"'x\n\n```bash\necho {word}\n```'" for word in words)
    options = ["env.tasks=write-greeting", "tracker=none", "policy=scripted", f"policy.replies=[{replies}]"]
    out = folder / f"{exchanges}.json"
    subprocess.run(
        [sys.executable, "-c", TRACED, *options, f"hydra.run.dir={folder / str(exchanges)}"],
        env={**os.environ, "COUNTED": str(out)},
        cwd=folder,
        timeout=200,
        capture_output=True,
        check=False,
    )
    return dict(json.loads(out.read_text()))


@pytest.mark.local
@pytest.mark.once
def test_exchange_takes_few_calls(tmp_path: Path) -> None:
    short, long = counted(3, tmp_path), counted(13, tmp_path)
    assert (long["calls"] - short["calls"]) / 10 <= MOST_CALLS
    assert short["files"] <= MOST_FILES
