"""Warnings of many tasks: a sentence a kind."""

from __future__ import annotations

import logging

import pytest

from ares_exp.tasks.task_warnings import TaskWarnings


def told(*warnings: tuple[str, str]) -> list[str]:
    sentences: list[str] = []
    collected = TaskWarnings()
    for name, sentence in warnings:
        collected.add(name, [sentence])
    collected.tell(sentences.append)
    collected.tell(sentences.append)
    return sentences


def test_one_kind_is_one_sentence_with_the_number_of_tasks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    many = [(f"task-{n}", f"task-{n}: task.toml: unknown key colour is ignored") for n in range(28)]
    [said] = told(*many)
    assert said == "28 tasks: task.toml: unknown key colour is ignored (task-0, task-1, task-2 and 25 more)"
    assert all(f"task-{n}" in caplog.text for n in range(28)), "the log has them all"


def test_numbers_are_no_kinds_of_their_own() -> None:
    limits = [("a", "cpus=1: not enforced"), ("b", "b: cpus=1: not enforced"), ("c", "Task c: cpus=0.5: not enforced")]
    assert told(*limits) == ["3 tasks: cpus=1/0.5: not enforced (a, b, c)"]
    assert told(*((f"t{n}", f"memory_mb={n}: no") for n in range(1, 6))) == [
        "5 tasks: memory_mb=1/2/3/…: no (t1, t2, t3 and 2 more)"
    ]


def test_names_inside_of_a_sentence_are_no_kinds_either() -> None:
    paths = [(name, f"skipped: /set/{name}/task.toml: no table") for name in ("a", "b-1", "c(2)")]
    assert told(*paths) == ["3 tasks: skipped: /set/…/task.toml: no table (a, b-1, c(2))"]


def test_another_kind_is_another_sentence_and_a_single_task_keeps_its_own() -> None:
    assert told(("a", "one"), ("b", "two"), ("a", "two"), ("c", "step 3 of c")) == [
        "a: one", "2 tasks: two (b, a)", "c: step 3 of c",
    ]  # fmt: skip
