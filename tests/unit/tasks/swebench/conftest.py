from pathlib import Path
from typing import Any

import pytest

from tests.swebench_rows import make_repository, make_row


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The repository with the bug, its fix and the tag on it; and the commit with the bug. Not to be changed."""
    return make_repository(tmp_path_factory.mktemp("repositories"))


@pytest.fixture
def row(repository: tuple[Path, str]) -> dict[str, Any]:
    return make_row(*repository)
