"""The end of docs/architecture.md: folders and loose modules of the package, floor by floor, by their docstrings."""

import ast
from pathlib import Path

import ares_exp
from tests.docs_reference.markdown import plain, table
from tests.unit.test_imports import FLOORS

PACKAGE = Path(ares_exp.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def packages_page() -> str:
    text, heading, _ = PAGE.read_text().partition("## Packages\n")
    rows = [(str(number), f"`{name}`", *_said(name)) for number, floor in enumerate(FLOORS) for name in floor]
    return (
        f"{text}{heading}\nThe folders and the loose modules of `ares_exp`, from bottom to top. A module imports "
        "only from floors\nbelow its own. `python -m tests.docs_reference` writes this table from the docstrings.\n\n"
        f"{table(('floor', 'name', 'content', 'imports'), rows)}"
    )


def _said(name: str) -> tuple[str, str]:
    """The first paragraph of a docstring, and the second of a folder's: its dependencies and its users."""
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    first, *rest = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
    imports = next((part for part in rest if part.startswith("Depends ")), "") if path.name == "__init__.py" else ""
    return plain(first), plain(imports)
