"""Functions that run the tests of a task in a container and read the reward."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import Container, ExecResult, User
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import (
    DownloadVerifierDirError,
    RewardFileNotFoundError,
    TransferError,
    VerifierError,
)
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.verification.redaction import redacted
from ares_exp.tasks.verification.rewards import REWARD_JSON, REWARD_TXT, read_verdict
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL, as_root

TESTS_DIR = "/tests"
VERIFIER_DIR = "/logs/verifier"
TEST_OUTPUT = "test-stdout.txt"
_OURS = (REWARD_TXT, REWARD_JSON, TEST_OUTPUT)
_SHOWN_OUTPUT_BYTES = 2000

Upload = Callable[[Container], Awaitable[None]]

_logger = logging.getLogger(__name__)


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
