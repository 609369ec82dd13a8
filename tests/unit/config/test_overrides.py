from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.config.overrides import parse_overrides, with_home


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("env.path=~/tasks", "HOME/tasks"),
        ("env.path=~", "HOME"),
        ("a=[~/b,c,~]", ["HOME/b", "c", "HOME"]),
        ("env.path=/a", "/a"),
    ],
)
def test_the_home_folder_is_put_in(typed: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/my own/${x}")
    [override] = parse_overrides(with_home([typed]))
    assert override.value() == _in_home(value)


def test_it_is_put_in_for_each_job_of_a_sweep() -> None:
    [override] = parse_overrides(with_home(["env.path=~/a,~/b"]))
    assert [str(one).strip('"') for one in override.sweep_string_iterator()] == [f"{Path.home()}/a", f"{Path.home()}/b"]


def test_it_is_put_in_a_flag() -> None:
    assert with_home(["--config-dir=~/options"]) == [f"--config-dir={Path.home()}/options"]


@pytest.mark.parametrize("typed", ["~tracker", "~env.x=1", "x='~/y'", "x=a~/b", "x=~user/y", "--multirun"])
def test_everything_else_stays(typed: str) -> None:
    assert with_home([typed]) == [typed]


def _in_home(value: object) -> object:
    if isinstance(value, list):
        return [_in_home(one) for one in value]
    return str(value).replace("HOME", "/home/my own/\\${x}")
