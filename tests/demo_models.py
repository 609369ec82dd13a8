import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def demo_models() -> Iterator[str]:
    command = (sys.executable, "-m", "ares_exp.testing.demo_server", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().partition(" at ")[2].partition(". Stop")[0]
        server.send_signal(signal.SIGINT)
        server.wait(60)
