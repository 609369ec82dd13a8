"""A folder that appears whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.run_dir import sync_to_disk


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes it when the body ends without an exception.

    Raises:
        ConfigError: There is something already.
        OSError: It cannot be made.
    """
    if os.path.lexists(out):
        raise ConfigError(f"Expected a directory that is not there yet, but {out} exists. Choose another one.")
    place = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    place.mkdir(parents=True)
    try:
        yield place
        place.rename(out)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    sync_to_disk(out.absolute().parent)
