"""Mistakes with SWE-bench on the command line."""

import pytest

from tests.conftest import Cli

pytestmark = pytest.mark.once


def test_missing_rows_file_is_a_user_error(cli: Cli) -> None:
    done = cli("env=swebench", "env.dataset=no.jsonl")
    assert done.returncode == 2
    assert "expected a file of SWE-bench rows" in done.stderr
    assert "Traceback" not in done.stderr
