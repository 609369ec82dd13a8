"""Functions that run the tests of a task in a container, and read and choose the reward.

The files of the tests, `reward.json` or `reward.txt`, are untrusted, because an agent may have influenced them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import Container, ExecResult, User
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import (
    DownloadVerifierDirError,
    RewardFileEmptyError,
    RewardFileNotFoundError,
    TransferError,
    VerifierError,
    VerifierOutputParseError,
)
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.verification.collection import redacted
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL, as_root

_logger = logging.getLogger(__name__)

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


TESTS_DIR = "/tests"
VERIFIER_DIR = "/logs/verifier"
TEST_OUTPUT = "test-stdout.txt"
_OURS = (REWARD_TXT, REWARD_JSON, TEST_OUTPUT)
_SHOWN_OUTPUT_BYTES = 2000

Upload = Callable[[Container], Awaitable[None]]


async def run_tests(container: Container, upload: Upload, *, env: Mapping[str, str], user: User | None) -> ExecResult:
    """Uploads the tests and runs `test.sh`, which must write a reward file. Its exit code does not matter."""
    # A command of the agent may have left a reward file, or a directory at its path.
    await as_root(
        container, f"rm -rf {' '.join(map(_in_container, _OURS))}", purpose="remove old rewards", failure=VerifierError
    )
    await upload(container)
    await as_root(
        container,
        f"chmod a+rx {TESTS_DIR} && chmod +x {TESTS_DIR}/test.sh",
        purpose="make the tests executable",
        failure=VerifierError,
    )
    cwd = await usable_workdir(container, user=user)
    script = f"{TESTS_DIR}/test.sh > {_in_container(TEST_OUTPUT)} 2>&1"
    # Not a login shell, because the agent may have changed the profile files, which also reset PATH of the image.
    return await container.exec(script, env=env, user=user, cwd=cwd, shell="bash -c")


def _in_container(name: str) -> str:
    return f"{VERIFIER_DIR}/{name}"


async def fetch_verdict(
    container: Container, folder: Path, *, reward_key: str | None, secrets: Sequence[str], run: ExecResult
) -> Verdict:
    """Downloads `/logs/verifier` from the container into `folder`, masks `secrets` there, and reads the reward.

    `run` is the result of `test.sh`, for error messages.

    Raises:
        DownloadVerifierDirError: The output could not be copied from the container.
        RewardFileNotFoundError: The tests did not write a reward. The message shows the end of their output.
    """
    await in_thread(lambda: _forget_rewards(folder))
    async with redacted(folder, secrets):
        try:
            await container.download(VERIFIER_DIR, folder)
        except TransferError as error:
            await _download_reward(container, folder, error)
    try:
        return await asyncio.to_thread(read_verdict, folder, reward_key=reward_key)
    except RewardFileNotFoundError as error:
        printed = await asyncio.to_thread(_end_of_output, folder)
        command = f"stat -c '%n is a %F.' {_in_container(REWARD_JSON)} {_in_container(REWARD_TXT)} 2>/dev/null"
        found = await container.exec(command, cwd="/", user="root", timeout_sec=60, shell=PLAIN_SHELL)
        special = found.output[:_SHOWN_OUTPUT_BYTES].strip()
        what = f"Expected the tests to write the reward to a regular file. {special}" if special else str(error)
        raise RewardFileNotFoundError(f"{what} test.sh ended with exit code {run.exit_code}, and {printed}") from None


async def _download_reward(container: Container, folder: Path, cause: TransferError) -> None:
    """Downloads only the reward file, after the download of all output has failed, for example because of its size.

    If this also fails, raises `DownloadVerifierDirError` with the first failure, `cause`.
    """
    for name in (REWARD_JSON, REWARD_TXT):
        with suppress(TransferError):
            await container.download(_in_container(name), folder / name)
            _logger.warning("Only a part of %s (%s) was copied out of the container: %s", VERIFIER_DIR, name, cause)
            return
    raise DownloadVerifierDirError(f"{VERIFIER_DIR} could not be copied out of the container: {cause}") from cause


def _forget_rewards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (REWARD_JSON, REWARD_TXT):
        (folder / name).unlink(missing_ok=True)


def _end_of_output(folder: Path) -> str:
    path = folder / TEST_OUTPUT
    if path.is_symlink() or not path.is_file():
        return "it left no output."
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SHOWN_OUTPUT_BYTES))
        text = file.read().decode("utf-8", errors="replace").strip()
    return f"the end of its output:\n{text}" if text else "it printed nothing."


async def verify(
    container: Container,
    *,
    upload: Upload,
    env: Mapping[str, str],
    user: User | None,
    output_dir: Path | None,
    reward_key: str | None,
    secrets: Sequence[str] = (),
) -> Verdict:
    """Runs the tests and reads the reward. The caller must enforce a time limit.

    Args:
        container: Container of the tests.
        upload: Function that uploads the tests to `/tests`. It does nothing if the image contains the tests.
        env: Environment variables of the test script.
        user: User of the script; `None` for the image's user.
        output_dir: Directory on the host for the verifier's files; `None` saves no files.
        reward_key: Key of the reward in `reward.json`; see `choose_reward`.
        secrets: Values to mask in the saved files.

    Raises:
        VerifierError: The verifier wrote no usable reward. The class of the error identifies the cause.
    """
    run = await run_tests(container, upload, env=env, user=user)
    async with working_directory("verifier") if output_dir is None else nullcontext(output_dir) as folder:
        return await fetch_verdict(container, folder, reward_key=reward_key, secrets=secrets, run=run)


async def usable_workdir(container: Container, *, user: User | None) -> str | None:
    """Returns the directory in which the test script starts: `None` (the container's working directory) or `/`.

    If the agent removed the working directory, it is created again. If this fails, for example because of a file at its
    path, or if `user` cannot access the directory, the script starts in `/`.
    """
    if not await _is_usable(container, "root"):  # root first: some backends open shells there
        async with working_directory("verifier") as nothing:
            try:
                await container.upload(nothing, ".")  # creates the directory
            except TransferError:
                return "/"
    return None if await _is_usable(container, user) else "/"


async def _is_usable(container: Container, user: User | None) -> bool:
    return (await container.exec('test -e "$(pwd -P)"', user=user, timeout_sec=60, shell=PLAIN_SHELL)).exit_code == 0
