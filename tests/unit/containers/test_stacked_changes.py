from __future__ import annotations

import pytest

from ares_exp.containers.docker.capture import stacked
from ares_exp.containers.filesystem.delta import Entry

FILE, OTHER, GONE = Entry("file", mode=0o644), Entry("file", mode=0o600), Entry("whiteout")
DIRECTORY, HIDING = Entry("directory", mode=0o755), Entry("directory", mode=0o755, opaque=True)


def never(path: str) -> bool:
    raise AssertionError(f"the base was asked for {path}")


def on(*paths: str) -> dict[str, Entry]:
    return dict.fromkeys(paths, DIRECTORY)


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        ({"/a": FILE}, {}, {"/a": FILE}),
        ({}, {"/a": GONE}, {"/a": GONE}),
        ({"/a": FILE}, {"/a": OTHER}, {"/a": OTHER}),
        ({"/a": GONE}, {"/a": FILE}, {"/a": FILE}),
        ({"/a": GONE}, {"/a": DIRECTORY}, {"/a": HIDING}),
        ({"/a": FILE}, {"/a": DIRECTORY}, {"/a": HIDING}),
        ({"/a": HIDING, "/a/b": FILE}, {"/a": DIRECTORY, "/a/c": FILE}, {"/a": HIDING, "/a/b": FILE, "/a/c": FILE}),
        ({**on("/a"), "/a/b": FILE}, {"/a": HIDING, "/a/c": OTHER}, {"/a": HIDING, "/a/c": OTHER}),
        ({**on("/a", "/a/b"), "/a/b/c": FILE}, {"/a": FILE}, {"/a": FILE}),
        ({"/a": HIDING, "/a/b": FILE}, {**on("/a"), "/a/b": GONE}, {"/a": HIDING}),
        ({**on("/a"), "/a/b": GONE}, {**on("/a"), "/a/c": GONE}, {**on("/a"), "/a/b": GONE, "/a/c": GONE}),
        ({"/ab": FILE, **on("/a"), "/a/x": FILE}, {"/a": FILE}, {"/a": FILE, "/ab": FILE}),
    ],
)
def test_without_a_look_at_the_base(
    lower: dict[str, Entry], upper: dict[str, Entry], expected: dict[str, Entry]
) -> None:
    assert stacked(lower, upper, never) == expected


@pytest.mark.parametrize(("base", "expected"), [({"/a"}, {"/a": GONE}), (set(), {})])
@pytest.mark.parametrize("lower", [{"/a": FILE}, {**on("/a"), "/a/b": FILE}])
def test_what_was_new_and_is_gone_leaves_no_trace(
    lower: dict[str, Entry], base: set[str], expected: dict[str, Entry]
) -> None:
    assert stacked(lower, {"/a": GONE}, base.__contains__) == expected


def test_names_of_one_file_part_where_the_overlay_parts_them() -> None:
    linked, changed = Entry("file", link=7), Entry("file", size=1, link=7)
    three = stacked({"/a": linked, "/b": linked, "/c": linked}, {"/b": Entry("file", size=1)}, never)
    assert three["/a"].link == three["/c"].link is not None
    assert three["/b"].link is None
    apart = stacked({"/a": linked, "/b": linked}, {"/b": changed, "/d": changed}, never)
    assert apart["/a"].link is None
    assert apart["/b"].link == apart["/d"].link is not None
