import logging
from dataclasses import dataclass

import pytest

from ares_exp.errors import ConfigError
from ares_exp.tasks.selection import Entries, parse_position, select


@dataclass(frozen=True)
class Item:
    name: str


NAMES = [*(f"fix-{i}" for i in range(5)), *(f"write-{i}" for i in range(5))]
ITEMS = [Item(name) for name in NAMES]


def chosen(selector: Entries, exclude: list[str] | str | None = None, limit: int | None = None) -> list[str]:
    return [item.name for item in select(ITEMS, tasks_selector=selector, exclude=exclude, limit=limit)]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (None, NAMES),
        ("fix-1", ["fix-1"]),
        ("fix-*", NAMES[:5]),
        ("*-[12]", ["fix-1", "fix-2", "write-1", "write-2"]),
        (5, ["write-0"]),
        ("5", ["write-0"]),
        ("0:2", NAMES[:2]),
        ("8:", NAMES[8:]),
        (":3", NAMES[:3]),
        ("::4", ["fix-0", "fix-4", "write-3"]),
        ("7:100", NAMES[7:]),
        ("@0/3", NAMES[:3]),
        ("@2/3", NAMES[6:]),
        (["write-0", "fix-*", 0, "0:2"], NAMES[:6]),
        (["9", "1"], ["fix-1", "write-4"]),
    ],
)
def test_selected_in_the_order_of_the_set(selector: Entries, expected: list[str]) -> None:
    assert chosen(selector) == expected


def test_name_takes_precedence_over_position() -> None:
    items = [Item("1"), Item("0")]
    assert select(items, tasks_selector="0") == [Item("0")]
    assert select(items, tasks_selector="0:1") == [Item("1")]


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("10", "expected an index below 10, got 10"),
        (-1, "without negative numbers, got '-1'"),
        ("-3:", "without negative numbers, got '-3:'"),
        ("1:2:3:4", "expected an index 5, a slice 0:10"),
        ("::0", "a step of at least 1"),
        ("5:5", "expected a slice with at least one item"),
        ("50:", "expected a slice with at least one item, but the slice selects none of the 10 items"),
        ("@", "a shard @2/8"),
        ("@2", "a shard @2/8"),
        ("@3/3", "i from 0 to n - 1"),
        ("@0/0", "i from 0 to n - 1"),
        ("@0/11", "expected at least 11 items for 11 shards, got 10"),
        ("wirte-1", "Did you mean 'write-1'"),
        ([], r"to name tasks, got an empty list\. Use env\.tasks=null for all"),
        (["zzz", "yyy-*"], "got 'zzz', 'yyy-\\*'"),
    ],
)
def test_unknown_selector_lists_the_tasks(selector: Entries, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        chosen(selector)
    assert selector == [] or "env=harbor has 10 tasks: 0 fix-0, 1 fix-1" in str(caught.value)


def test_empty_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`env\.exclude` '\*' excludes all 10"):
        chosen(None, exclude=["*"])
    with pytest.raises(ConfigError, match="found none"):
        select([])


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(ConfigError, match=r"`env\.limit` to be at least 1"):
        chosen(None, limit=limit)


def test_partially_unmatched_selector_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(["fix-0", "write-9"]) == ["fix-0"]
    assert "'write-9' matches no task" in caplog.text


def test_unmatched_exclude_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen("fix-*", exclude=["fix-0", "fix0", "none-*", "write-1"]) == NAMES[1:5]
    warned = [record.getMessage() for record in caplog.records]
    assert warned[0].startswith("env.exclude: 'fix0' matches no task of env=harbor. Did you mean 'fix-")
    assert warned[1:] == ["env.exclude: 'none-*' matches no task of env=harbor."]


def test_long_list_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"19 task-19, and 80 more\."):
        select([Item(f"task-{i}") for i in range(100)], tasks_selector="nope")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_shards_are_a_partition_of_even_sizes(count: int) -> None:
    shards = [parse_position(f"@{i}/{count}")(NAMES) for i in range(count)]
    assert [name for shard in shards for name in shard] == NAMES
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("text", ["", "a", "1.5", "@1", "-1", "+1", "1:a", "１"])
def test_invalid_positions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an index 5"):
        parse_position(text)
