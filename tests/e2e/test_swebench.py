"""Mistakes with SWE-bench on the command line."""

from __future__ import annotations

import pytest

from tests.conftest import Cli

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "`env.dataset` is needed"),
        (("env.dataset=no.jsonl",), "expected a file of SWE-bench rows"),
    ],
)
def test_mistakes_are_told_in_one_paragraph(cli: Cli, options: tuple[str, ...], told: str) -> None:
    done = cli("env=swebench", *options)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
