from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.errors import RewardFileEmptyError, RewardFileNotFoundError, VerifierOutputParseError
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.verification.rewards import (
    MAX_REWARD_BYTES,
    choose_reward,
    overall_verdict,
    parse_reward_json,
    parse_reward_txt,
    read_verdict,
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"1", 1.0), (b" 0.5 \n", 0.5), (b"-1", -1.0), (b"+1", 1.0), (b".5", 0.5), (b"1e-3", 0.001), (b"1_000", 1000.0)],
)
def test_reward_txt_accepted(data: bytes, expected: float) -> None:
    rewards = parse_reward_txt(data)
    assert rewards == {"reward": expected}
    assert type(rewards["reward"]) is float


@pytest.mark.parametrize(
    "data",
    [
        *(b" ", b"\n", b"true", b"0x1", b"1,0", b"1 2", b"1\n2", b"\xef\xbb\xbf1", b"1\0", b"\xff", b"passed"),
        *(b"nan", b"inf", b"-inf", b"1e309"),
    ],
)
def test_reward_txt_refused(data: bytes) -> None:
    with pytest.raises(VerifierOutputParseError, match=r"reward\.txt: expected one finite number, got"):
        parse_reward_txt(data)


@pytest.mark.parametrize("parse", [parse_reward_txt, parse_reward_json])
def test_no_bytes(parse: object) -> None:
    with pytest.raises(RewardFileEmptyError):
        parse(b"")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"reward": 1}', {"reward": 1}),
        (b'{"a": 1, "b": 0.5}', {"a": 1, "b": 0.5}),
        (b"{}", {}),
        (b'{"reward": true}', {"reward": 1.0}),
        (b'{"reward": false}', {"reward": 0.0}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b' {"a": -3.5} \n', {"a": -3.5}),
    ],
)
def test_reward_json_accepted(data: bytes, expected: dict[str, float]) -> None:
    rewards = parse_reward_json(data)
    assert rewards == expected
    assert [type(value) for value in rewards.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    "data",
    [
        *(b'{"a": "1"}', b'{"a": null}', b'{"a": [1]}', b'{"a": {"b": 1}}'),
        *(b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e309}', b'{"a": 1' + b"0" * 400 + b"}"),
        *(b"[1]", b'"1"', b"null", b'\xef\xbb\xbf{"a": 1}', b'{"a": 1', b" \n", b"\xff", b"1", b"1.5", b"true"),
        *(b'{"\\ud800": 1}', b'{"a":' * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"),
    ],
)
def test_reward_json_refused(data: bytes) -> None:
    with pytest.raises(VerifierOutputParseError, match=r"reward\.json: expected a JSON object") as caught:
        parse_reward_json(data)
    assert len(str(caught.value)) < 600


def test_which_key_is_the_reward() -> None:
    assert choose_reward({"reward": 0.5, "speed": 9}) == 0.5
    assert choose_reward({"speed": 9}) == 9
    assert choose_reward({"reward": 0.5, "speed": 9}, "speed") == 9
    with pytest.raises(VerifierOutputParseError, match=r"got the keys: a, b\. .*env\.reward_key=<key>"):
        choose_reward({"b": 1, "a": 0})
    with pytest.raises(VerifierOutputParseError, match=r"expected a reward.*no reward"):
        choose_reward({})
    with pytest.raises(VerifierOutputParseError, match="'speed', got the keys: reward"):
        choose_reward({"reward": 1}, "speed")


def test_reward_json_goes_before_reward_txt(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    assert read_verdict(tmp_path).reward == 1.0
    (tmp_path / "reward.json").write_text('{"reward": 0.25, "style": 1}')
    verdict = read_verdict(tmp_path)
    assert (verdict.reward, dict(verdict.rewards)) == (0.25, {"reward": 0.25, "style": 1})
    (tmp_path / "reward.json").write_text("broken")
    with pytest.raises(VerifierOutputParseError):
        read_verdict(tmp_path)


def test_neither_file(tmp_path: Path) -> None:
    with pytest.raises(RewardFileNotFoundError, match=r"reward\.json or reward\.txt"):
        read_verdict(tmp_path)


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("1")
    inside = tmp_path / "verifier"
    inside.mkdir()
    (inside / "reward.txt").symlink_to(outside)
    with pytest.raises(VerifierOutputParseError, match="plain file"):
        read_verdict(inside)
    (inside / "reward.json").mkdir()
    with pytest.raises(VerifierOutputParseError, match=r"reward\.json: expected a plain file"):
        read_verdict(inside)


def test_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_bytes(b"1" + b" " * MAX_REWARD_BYTES)
    with pytest.raises(VerifierOutputParseError, match="at most 1048576 bytes"):
        read_verdict(tmp_path)


@pytest.mark.parametrize("rewards", [[1e308, 1e308], [10**308, 10**308, 1.0]])
def test_no_mean_that_is_no_number(rewards: list[float]) -> None:
    with pytest.raises(VerifierOutputParseError, match="finite"):
        overall_verdict([Verdict(reward, {"reward": reward}) for reward in rewards])
