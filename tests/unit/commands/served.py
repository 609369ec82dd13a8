import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ares_exp.commands.view import Server, Shelf


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with Server(Shelf(folder), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join(30)
