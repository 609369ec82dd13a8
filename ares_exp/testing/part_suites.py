"""Functions that create test classes for the parts that the user names with `pytest --ares-exp-part`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ares_exp.config.targets import import_target
from ares_exp.errors import ConfigError

METHODS: Mapping[str, Sequence[str]] = {
    "environment": ("reset", "step", "close"),
    "collector": ("begin_episode", "record_step", "end_episode"),
    "tracker": ("start", "log_episode", "finish"),
    "source": ("load", "make", "check"),
    "container": ("preflight", "check", "__call__"),
    "policy": ("__call__",),
}
"""Methods by which the kind of a part is recognised. Agents are recognised by the argument `llm_client`."""
FIXTURES = {"agent": "factory", "container": "factory"}
"""Names of the fixtures that return the part, by kind of part. For other kinds, the fixture is named like the kind."""


def suites_of(parts: Sequence[str], options: Sequence[str]) -> ModuleType:
    """Returns a module with a test class for each part (`package:Name` or `package.Name`).

    `options` are arguments for the constructor of each part, in the form `name=value`. A value is YAML. In a value,
    `{tmp}` is replaced with the path of the test's temporary directory.

    Raises:
        ConfigError: A part cannot be imported, its kind is not recognised, or a required package is missing.
    """
    import yaml

    module = ModuleType("part_suites")
    for name in parts:
        part = import_target(name.replace(":", "."))
        pairs = (option.partition("=") for option in options)
        values = {key: value if "{tmp}" in value else yaml.safe_load(value) for key, _, value in pairs}
        suite = _suite(part, name, values)
        vars(module)[suite.__name__] = suite
    return module


def _suite(part: Any, name: str, options: Mapping[str, Any]) -> type:
    kind = _kind_of(part, name)
    if kind == "container" and find_spec("pytest_asyncio") is None:
        raise ConfigError("The test suite for containers needs pytest-asyncio: pip install pytest-asyncio.")
    contract = vars(import_module(f"ares_exp.testing.{kind}_contract"))[f"{kind.capitalize()}Contract"]

    def given(self: object, tmp_path: Path) -> Any:
        if "llm_client" in inspect.signature(part).parameters:  # an agent class is its own factory
            return part
        folder = str(tmp_path)
        return part(
            **{name: one.replace("{tmp}", folder) if isinstance(one, str) else one for name, one in options.items()}
        )

    return type(f"Test{part.__name__}", (contract,), {FIXTURES.get(kind, kind): pytest.fixture(given)})


def _kind_of(part: Any, name: str) -> str:
    has: dict[str, Any] = {}
    for base in reversed(part.__mro__) if inspect.isclass(part) else ():
        has |= vars(base)
    if any("llm_client" in inspect.signature(one).parameters for one in (part, has.get("__call__", part))):
        return "agent"
    for kind, methods in METHODS.items():
        if all(callable(has.get(one)) for one in methods):
            return kind
    methods_of = "; ".join(f"{kind}: {', '.join(methods)}" for kind, methods in METHODS.items())
    raise ConfigError(
        f"Expected {name} to be the class of an agent, which accepts an `llm_client`, or a class with the methods of a "
        f"part ({methods_of}). To test another object, inherit from a suite in a test file."
    )
