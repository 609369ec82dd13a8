"""What a normaliser takes, and what it leaves."""

import os
import random
import re
import tempfile
import time
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from pydantic import TypeAdapter, ValidationError

from ares_exp.trajectories.request_diff import BUILT_IN, MAX_CHARS, UserNormaliser, make_normalisers, normalise

NOW = datetime(2026, 1, 31, 12, 0, 7, 123456, UTC)


def normalised(name: str, text: str) -> str:
    return str(normalise(text, make_normalisers([name]), set()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("timestamps", NOW.isoformat()),
        ("timestamps", NOW.strftime("%Y-%m-%dT%H:%M:%SZ")),
        ("timestamps", NOW.strftime("%Y-%m-%d %H:%M:%S,123")),
        ("timestamps", NOW.strftime("%Y-%m-%d %H:%M +0100")),
        ("timestamps", NOW.strftime("%a %b %e %H:%M:%S UTC %Y")),
        ("timestamps", time.asctime(NOW.timetuple())),
        ("timestamps", format_datetime(NOW)),
        ("timestamps", "Sat Jan 31 12:00:00 PM CEST 2026"),
        ("timestamps", "Jan  1 09:05"),
        ("durations", "0.12s"),
        ("durations", "1.5 seconds"),
        ("durations", "340 ms"),
        ("durations", "0m0.012s"),
        ("durations", "12 µs"),
        ("memory_addresses", "0x7f3a5c0d1e20"),
        pytest.param("temp_paths", os.path.basename(tempfile.mktemp()), id="temp_paths"),  # noqa: PTH119
        ("container_ids", "3f2a91bc04de"),
        ("dates", "2026-01-31"),
        ("dates", "Jan 31, 2026"),
        ("dates", "31 Jan 2026"),
        ("times", "12:00:07.123"),
        ("epochs", f"{NOW.timestamp():.6f}"),
        ("epochs", str(int(NOW.timestamp() * 1e9))),
        ("uuids", "0b5a3c1e-8a6f-4c55-9d25-0a1b2c3d4e5f"),
    ],
)
def test_built_in_normaliser_replaces_its_pattern(name: str, text: str) -> None:
    before, after = ("in /", ": yes") if name == "temp_paths" else ("at ", ": yes")
    left = normalised(name, f"{before}{text}{after}")
    assert re.fullmatch(rf"{before}<[a-z]+>{after}", left), left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pid 4711 is", "pid <pid> is"),
        ("PIDs: 4711", "PIDs: <pid>"),
        ("pid=4711", "pid=<pid>"),
        ("bash: line 1:  4711 Killed", "bash: line 1: <pid> Killed"),
        ("rapid 4711", "rapid 4711"),
    ],
)
def test_process_ids_are_replaced(text: str, expected: str) -> None:
    assert normalised("pids", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "score 0.12, 17 rows, version 3.11.7, port 8080, 5 s, 30 seconds, 12 items",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08, 123456789012, deadbeef, 0x1f",
        "2026-01-31, Jan 2026, 12:00, ratio 1:30:20, tmpfs, /tmp/result.txt, template /tmp/tmp",
        "def f(x): return x[0:10]",
    ],
)
def test_default_list_leaves_other_text(text: str) -> None:
    default = ["timestamps", "durations", "memory_addresses", "pids", "temp_paths", "container_ids"]
    assert normalise(text, make_normalisers(default), set()) == text


def test_every_normaliser_takes_linear_time() -> None:
    """On texts that make backtracking expressions explode; the test's own time limit tells."""
    generator = random.Random(0)
    pieces = ["0" * 50, "a", "1.", "12:", "Jan ", "2026-01-", "pid ", "0x", " ", "tmp.", "-", ": 1 "]
    for piece in pieces:
        make = make_normalisers(list(BUILT_IN))
        normalise(piece * (200_000 // len(piece)), make, set())
    normalise("".join(generator.choices(pieces, k=50_000)), make_normalisers(list(BUILT_IN)), set())


def test_order_structure_and_used_normalisers_are_preserved() -> None:
    own = UserNormaliser(pattern=r"port (\d)\d+", replacement=r"port \1xxx")
    used: set[str] = set()
    value = {"role": "user", "content": [{"text": "port 8123 in 3 ms"}, 7, None]}
    left = normalise(value, make_normalisers(["durations", own, "dates"]), used)
    assert left == {"role": "user", "content": [{"text": "port 8xxx in <duration>"}, 7, None]}
    assert used == {"durations", own.pattern}


def test_known_secret_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    assert normalise("key very-secret-value", (), set()) == "key ***"


def test_very_long_texts_are_compared_unchanged() -> None:
    text = "3 ms " * (MAX_CHARS // 5)
    assert normalised("durations", text) == text


@pytest.mark.parametrize(
    "given",
    [
        {"pattern": "("},
        {"pattern": ""},
        {"pattern": "x" * 1001},
        {"pattern": "x", "replacement": r"\2"},
        {"pattern": "x", "replacement": r"\g<gone>"},
        {"pattern": "x", "replacement": "y" * 201},
        {"pattern": "x", "flags": 2},
        {"replacement": "y"},
    ],
)
def test_invalid_normaliser_is_rejected(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(UserNormaliser).validate_python(given)


def test_unknown_name_lists_the_available_ones() -> None:
    with pytest.raises(ValueError, match=r"no normaliser 'timestmps'. Use one of timestamps, .*uuids"):
        make_normalisers(["timestmps"])
