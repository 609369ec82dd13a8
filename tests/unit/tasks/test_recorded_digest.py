"""What a run records of a task, to tell when it is resumed whether it is still the same."""

from __future__ import annotations

import pytest

from ares_exp.tasks.task_files import changed_files, content_of, with_files


def test_a_task_without_files_beside_it() -> None:
    assert with_files("sha256:a", {}) == "sha256:a" == content_of("sha256:a")
    assert content_of(None) is None


def test_changed_files_are_named_and_the_content_is_told_apart() -> None:
    before, now = (with_files("sha256:a", {"/a hint": text, "/b": "same"}) for text in ("one", "two"))
    assert before != now
    assert content_of(before) == content_of(now) == "sha256:a"
    assert changed_files(before, now) == ["/a hint"]
    assert changed_files(before, before) == []


@pytest.mark.parametrize("recorded", [None, "sha256:a", "sha256:a {", "sha256:a []", 'sha256:a {"/c": 1}', 5])
def test_what_an_older_or_broken_record_does_not_tell_has_not_changed(recorded: str | None) -> None:
    assert changed_files(recorded, with_files("sha256:a", {"/b": "x"})) == []
