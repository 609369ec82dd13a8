"""The package stays small: its folders, packages and modules, and the contracts that only one class has."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
PACKAGE = Path(__file__).parents[2] / "ares_exp"
MODULES = [path for path in PACKAGE.rglob("*.py") if "samples" not in path.parts]

IMPLEMENTATIONS = {
    "capture",
    "container",
    "creation",
    "environment",
    "factory",
    "leftovers",
    "restore",
    "source",
    "terminal",
    "transfer",
}
"""Base names of modules that implement one contract in several packages."""

PUBLIC_CONTRACTS = {"AgentTerminal", "StatefulAgent"}
"""Protocols that users implement or call, and that the package implements at most once."""

CALLED_FROM_BELOW = {"EpisodeListener"}
"""Protocols for one class that the module may not import, because that class is above it."""


def named(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.name not in ("__init__.py", "__main__.py")]


def test_package_has_at_most_17_folders() -> None:
    assert len({path.relative_to(PACKAGE).parts[0] for path in MODULES if path.parent != PACKAGE}) <= 17


def test_package_has_at_most_45_packages() -> None:
    assert len({path.parent for path in MODULES}) <= 45


def test_no_package_has_more_than_25_modules() -> None:
    sizes = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in named(MODULES))
    assert {name: size for name, size in sizes.items() if size > 25} == {}


def test_no_base_name_is_used_twice() -> None:
    folders = defaultdict(list)
    for path in named(MODULES):
        folders[path.stem].append(path.parent.relative_to(PACKAGE).as_posix())
    assert {name: found for name, found in folders.items() if len(found) > 1 and name not in IMPLEMENTATIONS} == {}


class Described:
    """The names of a class's own members, and of its bases."""

    def __init__(self, node: ast.ClassDef) -> None:
        self.name = node.name
        self.bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        self.is_protocol = "Protocol" in self.bases
        self.members = set(self._members(node))

    @staticmethod
    def _members(node: ast.ClassDef) -> Iterator[str]:
        for part in node.body:
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield part.name
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield part.target.id
            elif isinstance(part, ast.Assign):
                yield from (target.id for target in part.targets if isinstance(target, ast.Name))
        for part in ast.walk(node):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            ):
                yield part.attr


def test_protocols_have_several_implementations() -> None:
    trees = [ast.parse(path.read_text()) for path in MODULES]
    classes = [Described(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    by_name = {one.name: one for one in classes}

    def members(one: Described) -> set[str]:
        return one.members.union(
            *(members(by_name[base]) for base in one.bases if base in by_name and base != one.name)
        )

    everything = {id(one): members(one) for one in classes}
    single = set()
    for protocol in (one for one in classes if one.is_protocol):
        needed = {name for name in everything[id(protocol)] if not name.startswith("_") or name == "__call__"}
        found = [one.name for one in classes if not one.is_protocol and needed and needed <= everything[id(one)]]
        if len(found) <= 1:
            single.add(protocol.name)
    assert single == PUBLIC_CONTRACTS | CALLED_FROM_BELOW
