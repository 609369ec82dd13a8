from pathlib import Path

import pytest

from ares_exp.errors import VerifierOutputParseError
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.verification.verification import (
    MAX_REWARD_BYTES,
    choose_reward,
    overall_verdict,
    parse_reward_json,
    read_verdict,
)


@pytest.mark.parametrize(
    "data",
    [
        *(b'{"a": 1' + b"0" * 400 + b"}", b"\xff", b"1.5"),
        *(b'{"\\ud800": 1}', b'{"a":' * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"),
    ],
)
def test_invalid_reward_json_is_refused(data: bytes) -> None:
    with pytest.raises(VerifierOutputParseError, match=r"reward\.json: expected a JSON object") as caught:
        parse_reward_json(data)
    assert len(str(caught.value)) < 600


def test_reward_key_is_selected() -> None:
    assert choose_reward({"reward": 0.5, "speed": 9}) == 0.5
    assert choose_reward({"speed": 9}) == 9
    assert choose_reward({"reward": 0.5, "speed": 9}, "speed") == 9
    with pytest.raises(VerifierOutputParseError, match=r"got the keys: a, b\. .*env\.reward_key=<key>"):
        choose_reward({"b": 1, "a": 0})
    with pytest.raises(VerifierOutputParseError, match=r"expected at least one reward"):
        choose_reward({})
    with pytest.raises(VerifierOutputParseError, match="got the keys: reward"):
        choose_reward({"reward": 1}, "speed")


def test_irregular_reward_file_is_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("1")
    inside = tmp_path / "verifier"
    inside.mkdir()
    (inside / "reward.txt").symlink_to(outside)
    with pytest.raises(VerifierOutputParseError, match="regular file"):
        read_verdict(inside)
    (inside / "reward.json").mkdir()
    with pytest.raises(VerifierOutputParseError, match=r"reward\.json: expected a regular file"):
        read_verdict(inside)


def test_reward_file_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_bytes(b"1" + b" " * MAX_REWARD_BYTES)
    with pytest.raises(VerifierOutputParseError, match="more than 1048576 bytes"):
        read_verdict(tmp_path)


@pytest.mark.parametrize("rewards", [[1e308, 1e308], [10**308, 10**308, 1.0]])
def test_infinite_mean_is_refused(rewards: list[float]) -> None:
    with pytest.raises(VerifierOutputParseError, match="finite"):
        overall_verdict([Verdict(reward, {"reward": reward}) for reward in rewards])
