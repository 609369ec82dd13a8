"""The mode of the W&B tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.trackers.wandb_tracker import effective_mode

LOGIN = "machine api.wandb.ai\n  login user\n  password 0\n"
ELSEWHERE = {"WANDB_BASE_URL": "https://wandb.example.com/"}


@pytest.mark.parametrize(
    ("netrc", "environ", "mode"),
    [
        (None, {}, "offline"),
        (LOGIN, {}, "online"),
        (LOGIN, {"WANDB_MODE": "offline"}, "offline"),
        (LOGIN, ELSEWHERE, "offline"),
        (LOGIN.replace("api.wandb.ai", "wandb.example.com"), ELSEWHERE, "online"),
        ("machine github.com login user password 0\n", {}, "offline"),
        ("machine", {}, "offline"),
        (None, {"WANDB_API_KEY": "0"}, "online"),
    ],
)
def test_a_login_counts_as_a_key(tmp_path: Path, netrc: str | None, environ: dict[str, str], mode: str) -> None:
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
        (tmp_path / ".netrc").chmod(0o600)
    assert effective_mode("auto", {"HOME": str(tmp_path), **environ}) == mode


def test_the_netrc_file_may_be_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(LOGIN)
    (tmp_path / "mine").chmod(0o600)
    assert effective_mode("auto", {"NETRC": str(tmp_path / "mine")}) == "online"
    assert effective_mode("auto", {}) == "offline"
