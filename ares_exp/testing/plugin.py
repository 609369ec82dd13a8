"""A pytest plugin: `pytest --ares-exp-part=my_package:MyContainer` runs the conformance suite for a part.

pytest loads the plugin whenever this package is installed. To keep other test runs fast, the plugin imports the rest of
the package only if a part is named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

SUITES = Path(__file__).with_name("part_suites.py")
"""Path that pytest shows for the tests of the parts. Their module is created in memory, and not read from this file."""
_SUITES = pytest.StashKey[ModuleType]()
_ASYNCIO = ("asyncio", "pytest_asyncio.plugin")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this plugin to pytest."""
    group = parser.getgroup("ares_exp", "conformance suites of ares_exp")
    group.addoption(
        "--ares-exp-part",
        action="append",
        default=[],
        metavar="PACKAGE:NAME",
        help="run the conformance suite for this class; repeatable",
    )
    group.addoption(
        "--ares-exp-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the class; {tmp} in a value is the test's temporary directory",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Adds the suites to the arguments of pytest, if a part is named.

    Also selects tests with any mark, and makes pytest-asyncio run `async` tests.
    """
    if early_config.known_args_namespace.ares_exp_part:
        args += [str(SUITES), "-m", ""]
        if any(map(early_config.pluginmanager.hasplugin, _ASYNCIO)):
            args.append("--asyncio-mode=auto")
        if (here := str(Path.cwd())) not in sys.path:  # as `python -m pytest` and `ares-exp` do
            sys.path.append(here)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Imports the parts and creates their suites."""
    if parts := session.config.getoption("ares_exp_part"):
        from ares_exp.errors import UserError
        from ares_exp.testing.part_suites import suites_of

        try:
            session.config.stash[_SUITES] = suites_of(parts, session.config.getoption("ares_exp_option"))
        except UserError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Returns the in-memory module with the suites if pytest asks for the path `SUITES`; otherwise `None`."""
    if module_path != SUITES or _SUITES not in parent.config.stash:
        return None
    module: pytest.Module = pytest.Module.from_parent(parent, path=module_path)
    module.obj = parent.config.stash[_SUITES]
    return module
