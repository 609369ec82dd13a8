"""Functions that parse `reward.json` or `reward.txt`, which the tests of a task write, and choose the reward.

These files are untrusted, because an agent may have influenced them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ares_exp.errors import RewardFileEmptyError, RewardFileNotFoundError, VerifierError, VerifierOutputParseError
from ares_exp.tasks.task_contract import Verdict

REWARD_JSON = "reward.json"
REWARD_TXT = "reward.txt"
MAX_REWARD_BYTES = 1024 * 1024


def read_verdict(folder: Path, *, reward_key: str | None = None) -> Verdict:
    """Reads the reward file in `folder`: `reward.json` if it exists, otherwise `reward.txt`.

    Raises:
        RewardFileNotFoundError: Neither file exists.
        RewardFileEmptyError: The file is empty.
        VerifierOutputParseError: The content of the file is not a reward.
    """
    for name, parse in ((REWARD_JSON, parse_reward_json), (REWARD_TXT, parse_reward_txt)):
        path = folder / name
        if path.exists() or path.is_symlink():
            rewards = parse(_read_bounded(path))
            return Verdict(choose_reward(rewards, reward_key), rewards)
    raise RewardFileNotFoundError(f"Expected the tests to write {REWARD_JSON} or {REWARD_TXT}, found neither.")


def _read_bounded(path: Path) -> bytes:
    if not path.is_file() or not path.resolve().is_relative_to(path.parent.resolve()):
        raise VerifierOutputParseError(f"{path.name}: expected a regular file, got a link or a special file.")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_REWARD_BYTES + 1)
    except OSError as error:
        raise VerifierOutputParseError(f"{path.name}: cannot be read: {error}.") from None
    if len(data) > MAX_REWARD_BYTES:
        raise VerifierOutputParseError(f"{path.name}: the file has more than {MAX_REWARD_BYTES} bytes.")
    return data


def parse_reward_txt(data: bytes) -> dict[str, float]:
    """Parses a `reward.txt`, and returns its number as `{"reward": number}`. Raises the errors of `read_verdict`."""
    try:
        number = float(data.decode("utf-8").strip())
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _unparsable(REWARD_TXT, "one finite number", data)
    return {"reward": number}


def parse_reward_json(data: bytes) -> dict[str, float]:
    """Parses a `reward.json` into numbers by key (booleans as 0.0 or 1.0). Raises the errors of `read_verdict`."""
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not all(_is_scored(key, value) for key, value in content.items()):
        raise _unparsable(REWARD_JSON, "a JSON object whose values are finite numbers", data)
    return {key: float(value) if isinstance(value, bool) else value for key, value in content.items()}


def _is_scored(key: str, value: object) -> bool:
    try:
        key.encode()  # a lone surrogate, legal in JSON, could not be written to any record
        return isinstance(value, int | float) and math.isfinite(value)
    except (UnicodeEncodeError, OverflowError):
        return False


def choose_reward(rewards: Mapping[str, float], reward_key: str | None = None) -> float:
    """Returns the number with the key `reward_key`. Without a `reward_key`, returns `reward` or the only number.

    Raises:
        VerifierOutputParseError: The key `reward_key` is missing. Or `reward_key` is `None`, and there are several
            numbers without the key `reward`, or no numbers.
    """
    listing = ", ".join(sorted(rewards)[:20])
    if not rewards:
        raise VerifierOutputParseError(f"{REWARD_JSON}: expected at least one reward, got an empty object.")
    if reward_key is not None and reward_key not in rewards:
        raise VerifierOutputParseError(f"Expected the key {reward_key!r} (env.reward_key), got the keys: {listing}.")
    key = reward_key or ("reward" if "reward" in rewards else next(iter(rewards)))
    if reward_key is None and key != "reward" and len(rewards) > 1:
        raise VerifierOutputParseError(
            f"Expected the key 'reward' or a single key, got the keys: {listing}. Choose one with env.reward_key=<key>."
        )
    return rewards[key]


def reaches(verdict: Verdict, least: float | Mapping[str, float]) -> bool:
    """Returns whether the rewards of a verdict reach `least`: a minimum for `reward`, or minimums by key."""
    wanted = least if isinstance(least, Mapping) else {"reward": least}
    return all(verdict.rewards.get(key, -math.inf) >= number for key, number in wanted.items())


def overall_verdict(verdicts: Sequence[Verdict], *, reward_key: str | None = None) -> Verdict:
    """Computes the mean of each reward over the steps of a task. A reward that is missing in a step counts as 0."""
    keys = dict.fromkeys(key for verdict in verdicts for key in verdict.rewards)
    try:
        means = {key: sum(verdict.rewards.get(key, 0) for verdict in verdicts) / len(verdicts) for key in keys}
    except OverflowError:
        means = dict.fromkeys(keys, math.inf)
    if not all(map(math.isfinite, means.values())):
        raise VerifierOutputParseError("Expected a finite mean reward over the steps, but the rewards are too large.")
    return Verdict(choose_reward(means, reward_key), means)


def _unparsable(name: str, expected: str, data: bytes) -> VerifierError:
    if not data:
        return RewardFileEmptyError(f"{name}: expected a reward, got an empty file.")
    shown = data[:80].decode("utf-8", errors="replace")
    return VerifierOutputParseError(f"{name}: expected {expected}, got {shown!r}{' …' if len(data) > 80 else ''}.")
