"""The direction of imports between the folders of the package, and how many modules lie loose at its top."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
PACKAGE = Path(__file__).parents[2] / "ares_exp"

FLOORS = (
    ("errors", "cancellation", "backoff"),
    ("llms",),
    ("records",),
    ("config",),
    ("containers",),
    ("environment",),
    ("trajectories",),
    ("snapshots", "policies"),
    ("rollout",),
    ("tasks",),
    ("reports", "agents"),
    ("trackers",),
    ("environments",),
    ("runs",),
    ("wrappers",),
    ("gym", "training", "testing"),
    ("commands",),
    ("__main__",),
)
"""From the bottom to the top. A room imports only rooms of floors below its own; lazy and type-only imports count."""

TYPES_ONLY = {("errors", "llms"), ("environment", "snapshots")}
"""An exception carries the response that was paid for, and names its type; so does the contract what is exported."""


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "samples" not in path.parts]


def room(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The rooms that a module imports from, and whether for types only."""
    tree = ast.parse(path.read_text())
    type_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "ares_exp":
            names = [f"ares_exp.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ares_exp."):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("ares_exp.")]
        yield from ((room(name), id(node) in type_only) for name in names)


def test_every_package_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert sorted(rooms) == sorted(name for floor in FLOORS for name in floor)


def test_imports_point_downwards() -> None:
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = []
    for path in modules():
        relative = path.relative_to(PACKAGE)
        own = relative.parts[0].removesuffix(".py")
        if own == "__init__":
            continue  # the public names, imported when they are first used
        for imported, is_type in imports(path):
            allowed = imported == own or (is_type and (own, imported) in TYPES_ONLY)
            if not allowed and floor_of[imported] >= floor_of[own]:
                wrong.append(f"{relative} imports {imported}")
    assert wrong == []


def test_only_one_module_imports_zstd() -> None:
    """Which library it is depends on the version of Python."""
    library = re.compile(r"^ *(import|from) (zstandard|backports|compression)\b", re.MULTILINE)
    found = [path.relative_to(PACKAGE).as_posix() for path in modules() if library.search(path.read_text())]
    assert found == ["containers/filesystem/zstd.py"]


def test_root_package_is_imported_only_for_its_version() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module == "ares_exp"
        and any(
            not (PACKAGE / alias.name).exists() and not (PACKAGE / f"{alias.name}.py").exists() for alias in node.names
        )
        and [alias.name for alias in node.names] != ["__version__"]
    ]
    assert found == []


def test_few_modules_are_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PACKAGE.glob("*/__init__.py")), ids=lambda path: path.name
)
def test_every_folder_documents_its_imports(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert any(part.startswith("Depends ") for part in said.split("\n\n")[1:])


@pytest.mark.parametrize("module", ["docker.image", "docker.engine", "images.image_plan"])
def test_image_modules_can_be_imported_first(module: str) -> None:
    code = f"import ares_exp.containers.{module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
