"""docs/reference/packages.md: the folders and loose modules of the package, floor by floor, by their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

import ares_exp
from tests.docs_reference.markdown import GENERATED, plain, table
from tests.unit.test_imports import FLOORS

PACKAGE = Path(ares_exp.__file__).parent


def packages_page() -> str:
    """The page."""
    rows = [
        (str(number), f"[`{name}`](../../{_path(name)})", *_said(name))
        for number, floor in enumerate(FLOORS)
        for name in floor
    ]
    return (
        f"{GENERATED}# Packages\n\n"
        "The folders and the loose modules of `ares_exp`, from the bottom to the top: a module imports only from "
        "floors below its own. How they work together is in [architecture.md](../architecture.md).\n\n"
        f"{table(('floor', 'name', 'what lives there', 'imports'), rows)}"
    )


def _path(name: str) -> str:
    return f"ares_exp/{name}" if (PACKAGE / name).is_dir() else f"ares_exp/{name}.py"


def _said(name: str) -> tuple[str, str]:
    """The first paragraph of a docstring, and the second of a folder's: what it imports, and what imports it."""
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    first, *rest = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
    imports = next((part for part in rest if part.startswith("Imports ")), "") if path.name == "__init__.py" else ""
    return plain(first), plain(imports)
