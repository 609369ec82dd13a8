"""Checks before a run that depend on the backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.runs.preparation import bounded_concurrency


@pytest.mark.parametrize(
    ("most", "needs_container", "asked", "allowed"),
    [(None, True, 4, 4), (1, True, 1, 1), (1, True, 4, 1), (1, False, 4, 4)],
)
def test_concurrency_is_bounded_by_the_backend(
    most: int | None, needs_container: bool, asked: int, allowed: int
) -> None:
    parts: Any = SimpleNamespace(
        container_factory=SimpleNamespace(name="host", max_containers=most),
        source=SimpleNamespace(needs_container=needs_container),
    )
    warnings: list[str] = []
    assert bounded_concurrency(parts, asked, warnings.append) == allowed
    assert len(warnings) == (allowed != asked)
    assert all("container=host can run 1 episode at a time" in warning for warning in warnings)
