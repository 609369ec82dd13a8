"""`python -m tests.docs_reference [--check]`: writes docs/reference/*, and parts of other pages in docs.

They come from the config tree, the schema, `--help`, the names in a run directory, the docstrings of packages and the
first sentences of the pages; the schema of trajectories comes from their dataclasses, and the OpenAPI document of the
rollout service from the types of its bodies.
`--check` writes nothing and exits with 1 if a file is not what it should be.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ares_exp.training.service.serving import openapi
from tests.docs_reference.commands_page import commands_page
from tests.docs_reference.config_page import config_page
from tests.docs_reference.files_page import files_page
from tests.docs_reference.harbor_page import harbor_page
from tests.docs_reference.index_page import index_page, llms_txt
from tests.docs_reference.packages_page import packages_page
from tests.docs_reference.trajectory_schema import trajectory_schema

DOCS = Path(__file__).parent.parent.parent / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "reference/config.md": config_page,
    "reference/commands.md": commands_page,
    "reference/files.md": files_page,
    "architecture.md": packages_page,
    "compatibility.md": harbor_page,
    "reference/trajectory.schema.json": trajectory_schema,
    "reference/service.openapi.json": lambda: json.dumps(openapi(), indent=2) + "\n",
    "index.md": index_page,  # of all pages, those above included
    "llms.txt": llms_txt,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs_reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"docs/{name} {'is out of date' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
