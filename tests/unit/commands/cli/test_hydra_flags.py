"""The parser of Hydra, whose help texts are not all strings."""

from __future__ import annotations

import argparse
import sys

import pytest

from ares_exp.commands.cli.flags import unchecked_help


class Lazy:
    def __repr__(self) -> str:
        return "rendered"


def test_unchecked_help_accepts_an_object_for_a_while() -> None:
    before = argparse.ArgumentParser.add_argument
    with unchecked_help():
        action = argparse.ArgumentParser().add_argument("--flag", action="store_true", help=Lazy())  # type: ignore[arg-type]
    assert f"{action.help}" == "rendered"
    assert argparse.ArgumentParser.add_argument is before


def test_unchecked_help_is_restored_after_an_error() -> None:
    before = argparse.ArgumentParser.add_argument
    with pytest.raises(KeyError), unchecked_help():
        raise KeyError
    assert argparse.ArgumentParser.add_argument is before


@pytest.mark.skipif(sys.version_info[:2] != (3, 14), reason="only argparse of Python 3.14 rejects the parser of Hydra")
def test_hydra_still_needs_unchecked_help() -> None:
    from hydra._internal.utils import get_args_parser

    with pytest.raises(ValueError, match="badly formed help string"):
        get_args_parser()
    with unchecked_help():
        assert get_args_parser().parse_args(["--run", "a=b"]).overrides == ["a=b"]
