"""Warnings on a terminal: the first of a kind, then their number."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from ares_exp.records.secrets import RepeatedWarnings, SecretFilter


@pytest.fixture
def terminal() -> Iterator[tuple[logging.Logger, io.StringIO, RepeatedWarnings]]:
    logger, stream, repeated = logging.getLogger("test.repeated"), io.StringIO(), RepeatedWarnings()
    handler = logging.StreamHandler(stream)
    handler.addFilter(repeated)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, stream, repeated
    logger.removeHandler(handler)
    logger.propagate = True


def test_the_first_of_a_kind_is_shown_and_the_others_are_counted(
    terminal: tuple[logging.Logger, io.StringIO, RepeatedWarnings],
) -> None:
    logger, stream, repeated = terminal
    for number in range(28):
        logger.warning("The artifact %s was not collected: %s", f"/a{number}", "gone")
        logger.warning("%s", f"Episode {number} waits")
        logger.warning("%s failed: no disk", "The tracker" if number else "Writing the row")
        logger.error("Broken: %s", number)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if not line.startswith("Broken")] == [
        "The artifact /a0 was not collected: gone",
        "Episode 0 waits",
        "Writing the row failed: no disk",
        "The tracker failed: no disk",
    ]
    assert len([line for line in lines if line.startswith("Broken")]) == 28
    assert repeated.told() == [
        "27 more like this in run.log: The artifact /a0 was not collected: gone",
        "27 more like this in run.log: Episode 0 waits",
        "26 more like this in run.log: The tracker failed: no disk",
    ]
    assert repeated.told() == []


def test_masked_warnings_are_of_one_kind(terminal: tuple[logging.Logger, io.StringIO, RepeatedWarnings]) -> None:
    logger, stream, repeated = terminal
    for handler in logger.handlers:
        handler.filters.insert(0, SecretFilter(["hidden"]))  # in a run, it comes first
    for number in range(28):
        logger.warning("The artifact %s was not collected: %s", f"/hidden{number}", "gone")
    assert stream.getvalue() == "The artifact /***0 was not collected: gone\n"
    assert repeated.told() == ["27 more like this in run.log: The artifact /***0 was not collected: gone"]
