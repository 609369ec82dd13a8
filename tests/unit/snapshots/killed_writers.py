"""Commits snapshots in process after process, each killed at a random moment: `killed_writers.py STORE KILLS`."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.stores import add, changes, file, remove_all_but


def write_until_killed(path: Path, life: int, ready: int) -> None:
    store = SnapshotStore(path)
    for number in range(1_000_000):
        entries = {**changes(store.objects, 0), "/app/new.bin": file(store.objects, os.urandom(300_000))}
        add(store, f"life-{life}@{number}", number % 50, entries=entries)
        store.objects.sync()
        remove_all_but(store, f"life-{life}", 5)
        if number == 0:
            os.write(ready, b"x")


def main(path: Path, kills: int) -> None:
    moments = random.Random(kills)
    for life in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            write_until_killed(path, life, writing)
        if life % 4:  # else before the first one is complete
            os.read(reading, 1)
        time.sleep(moments.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        os.close(reading)
        os.close(writing)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
