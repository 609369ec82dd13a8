from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.installed_package import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Where a test installs packages."""
    return Site(tmp_path / "site", monkeypatch)


@pytest.fixture
def nim(site: Site) -> None:
    """The package of `tests/e2e/test_plugin.py`, installed for this test."""
    site.install("ares-nim", {"nim": "ares_nim.conf"})
    site.search(ROOT / "tests" / "e2e" / "ares_nim")
