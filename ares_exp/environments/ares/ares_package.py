"""The `martian-ares` package: imported late and within a time limit, since its import fetches a list from a server."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any, cast

from ares_exp.errors import ConfigError, PreflightError

NEEDS_PYTHON = (3, 12)
MODULES = ("ares", "ares.llms.response")
SHOWN_PRESETS = 20


def import_ares(timeout_sec: float) -> ModuleType:
    """Imports the package in a separate thread, so that a connection that hangs holds nothing up. Blocking.

    Args:
        timeout_sec: How long the import may take.

    Raises:
        PreflightError: It is not installed, cannot be imported, takes too long, or is another package of that name.
    """
    if "ares" not in sys.modules and importlib.util.find_spec("ares") is None:
        raise PreflightError(
            f"env=ares needs the package martian-ares, which is not installed: pip install martian-ares.{_python()}"
        )
    ended: list[ModuleType | BaseException] = []

    def load() -> None:
        try:
            ended.extend([importlib.import_module(name) for name in MODULES][:1])
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=load, name="import ares", daemon=True)
    thread.start()
    thread.join(timeout_sec)
    if not ended:
        raise PreflightError(
            f"`import ares` did not end within env.import_timeout_sec={timeout_sec:g}: the package fetches its list of "
            "data sets from a hosted registry while it is imported. Check the network, or allow it more time."
        )
    found = ended[0]
    if isinstance(found, BaseException):
        raise PreflightError(
            f"`import ares` failed with {type(found).__name__}: {str(found)[:300]}. The package fetches its list of "
            f"data sets from a hosted registry while it is imported: it needs the network then.{_python()}"
        ) from found
    if missing := [name for name in ("make", "info") if not callable(getattr(found, name, None))]:
        raise PreflightError(
            f"Expected the package martian-ares under the name `ares`, but {found.__file__} has no "
            f"`{'`, no `'.join(missing)}`: another package has that name. Install martian-ares in an environment "
            "without it."
        )
    return found


def count_tasks(ares: ModuleType, preset: str) -> int:
    """Counts the tasks of a preset.

    Raises:
        ConfigError: There is no such preset, or it does not say that it has tasks.
    """
    known = {str(one.name): one for one in ares.info()}
    if preset not in known:
        close = difflib.get_close_matches(preset, known, n=3)
        hint = f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
        more = f", and {len(known) - SHOWN_PRESETS} more" if len(known) > SHOWN_PRESETS else ""
        raise ConfigError(
            f"Expected `env.preset` to be a preset of martian-ares, got {preset!r}.{hint} It has: "
            f"{', '.join(sorted(known)[:SHOWN_PRESETS]) or 'none'}{more}."
        )
    count = known[preset].num_tasks
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"Expected the preset {preset!r} of martian-ares to have tasks, it says {count!r}.")
    return count


def container_class(ares: ModuleType, container: str) -> Any:
    """Finds the package's own container class of that name (`docker`, `daytona`)."""
    module = importlib.import_module(f"{ares.__name__}.containers.{container}")
    return getattr(module, f"{container.capitalize()}Container")


def response_module(ares: ModuleType) -> Any:
    """Finds the module of the package's response classes."""
    return cast("Any", importlib.import_module(f"{ares.__name__}.llms.response"))


def _python() -> str:
    if sys.version_info >= NEEDS_PYTHON:
        return ""
    here, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, NEEDS_PYTHON))
    return f" It needs Python {needed} or newer, and this is {here}."
