"""The emulator, driven by the real client: commands and files in a sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    DaytonaBadRequestError,
    DaytonaError,
    DaytonaNotFoundError,
    DaytonaProcessExecutionTimeoutError,
    FileDownloadRequest,
    FileUpload,
    SessionExecuteRequest,
)

from tests.daytona.emulator import Emulator
from tests.daytona.real_client import client_of, make, said

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.nightly]  # by day, the tests that use the emulator


@pytest_asyncio.fixture
async def client(emulator: Emulator) -> AsyncIterator[AsyncDaytona]:
    async with client_of(emulator) as client:
        yield client


@pytest_asyncio.fixture
async def sandbox(client: AsyncDaytona) -> AsyncSandbox:
    return await make(client)


async def test_a_command_has_one_merged_output_and_its_exit_code(sandbox: AsyncSandbox) -> None:
    done = await sandbox.process.exec("echo a; echo b >&2; echo c; exit 7")
    assert (done.exit_code, done.result) == (7, "a\nb\nc\n")


async def test_a_command_has_the_variables_of_its_sandbox_and_its_own(client: AsyncDaytona) -> None:
    sandbox = await make(client, env_vars={"A": "a'\n$x", "B": "b"})
    done = await sandbox.process.exec('echo "$A$B$C"', env={"B": "x y", "C": "c"})
    assert done.result == "a'\n$xx yc\n"


async def test_a_command_starts_where_it_is_told_to(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.process.exec("pwd", cwd="/usr/lib")).result == "/usr/lib\n"
    assert await said(sandbox, "pwd") == f"{await sandbox.get_work_dir()}\n"
    done = await sandbox.process.exec("pwd", cwd="/nowhere")
    assert (done.exit_code, done.result) == (-1, "chdir /nowhere: no such file or directory")


async def test_bytes_that_are_no_text_are_replaced_one_by_one(sandbox: AsyncSandbox) -> None:
    assert await said(sandbox, r"printf 'a\377\342\202z\303\251'") == "a\ufffd\ufffd\ufffdzé"


async def test_a_command_that_reads_stdin_eats_what_follows_it(sandbox: AsyncSandbox) -> None:
    assert await said(sandbox, "cat\necho not run") == "echo not run"


async def test_a_time_limit_kills_the_process_group_and_drops_its_output(sandbox: AsyncSandbox) -> None:
    with pytest.raises(DaytonaProcessExecutionTimeoutError) as caught:
        await sandbox.process.exec("echo $$ >/tmp/pid; echo lost; sleep 60.5 & sleep 60.5", timeout=1)
    assert (caught.value.status_code, caught.value.code) == (408, "PROCESS_EXECUTION_TIMEOUT")
    assert "lost" not in str(caught.value)
    assert await said(sandbox, "grep -l 60.5 /proc/[0-9]*/cmdline 2>/dev/null") == ""


async def test_a_background_process_blocks_the_answer_while_it_holds_the_output(sandbox: AsyncSandbox) -> None:
    await said(sandbox, "mkfifo /tmp/go")
    command = "(read -r word </tmp/go; echo $word) & echo first"
    held = asyncio.create_task(sandbox.process.exec(command, timeout=60))
    assert await said(sandbox, "echo free") == "free\n"
    assert not held.done()
    await said(sandbox, "echo later >/tmp/go")
    assert sorted(str((await held).result).split()) == ["first", "later"]
    assert await said(sandbox, "sleep 60 >/dev/null 2>&1 </dev/null & echo at once") == "at once\n"


async def test_commands_run_at_the_same_time(sandbox: AsyncSandbox) -> None:
    await said(sandbox, "mkfifo /tmp/a /tmp/b")
    one = said(sandbox, "echo 1 >/tmp/a; cat /tmp/b")
    other = said(sandbox, "cat /tmp/a; echo 2 >/tmp/b")
    assert await asyncio.gather(one, other) == ["2\n", "1\n"]


async def test_a_command_goes_on_when_nobody_waits_for_it(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    await said(sandbox, "mkfifo /tmp/started /tmp/go /tmp/done")
    command = "echo >/tmp/started; cat /tmp/go; echo ok >/tmp/done"
    async with client_of(emulator) as other:
        waiting = asyncio.create_task((await other.get(sandbox.id)).process.exec(command))
        await said(sandbox, "cat /tmp/started")
        waiting.cancel()
        await asyncio.wait({waiting})
    assert await said(sandbox, "echo >/tmp/go; cat /tmp/done") == "ok\n"


async def test_the_length_of_a_command_is_bounded_by_an_old_daemon(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    command = "#" + "x" * 128 * 1024 + "\necho read"
    done = await sandbox.process.exec(command)
    assert done.exit_code == -1
    assert "argument list too long" in done.result
    emulator.max_command_bytes = None
    assert await said(sandbox, command) == "read\n"


async def test_an_empty_command_and_a_bad_variable_are_refused(sandbox: AsyncSandbox) -> None:
    with pytest.raises(DaytonaBadRequestError, match="empty"):
        await sandbox.process.exec("  \n")
    with pytest.raises(DaytonaBadRequestError, match="a-b"):
        await sandbox.process.exec("true", env={"a-b": "1"})


async def test_a_session_keeps_its_shell(sandbox: AsyncSandbox) -> None:
    process = sandbox.process
    await process.create_session("s")
    await process.execute_session_command("s", SessionExecuteRequest(command="cd /usr; X=1"))
    done = await process.execute_session_command("s", SessionExecuteRequest(command="pwd; echo $X >&2; false"))
    assert (done.stdout, done.stderr, done.exit_code) == ("/usr\n", "1\n", 1)
    started = await process.execute_session_command("s", SessionExecuteRequest(command="echo hi", run_async=True))
    async with asyncio.timeout(30):
        while (await process.get_session_command("s", started.cmd_id)).exit_code is None:
            pass
    assert (await process.get_session_command_logs("s", started.cmd_id)).output == "hi\n"
    assert [len(one.commands) for one in await process.list_sessions()] == [3]
    await process.delete_session("s")
    with pytest.raises(DaytonaNotFoundError):
        await process.get_session("s")


async def test_files_go_in_and_come_out(emulator: Emulator, sandbox: AsyncSandbox, tmp_path: Path) -> None:
    content = os.urandom(3 * 1024 * 1024)
    names = ["/tmp/new/a b'c", "relative.bin", "/tmp/é"]
    await sandbox.fs.upload_files([FileUpload(source=content + name.encode(), destination=name) for name in names])
    assert emulator.requests[-1].body == names
    assert await said(sandbox, "stat -c '%a %U' /tmp/new/*") == "644 root\n"
    got = await sandbox.fs.download_files([FileDownloadRequest(source=name) for name in names])
    assert [one.result for one in got] == [content + name.encode() for name in names]
    await sandbox.fs.download_file("/tmp/é", str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == content + "/tmp/é".encode()


async def test_a_file_that_cannot_be_read_is_reported_beside_the_others(sandbox: AsyncSandbox) -> None:
    await sandbox.fs.upload_file(b"here", "/tmp/here")
    paths = ["/tmp/none", "/tmp", "/tmp/here"]
    got = await sandbox.fs.download_files([FileDownloadRequest(source=path) for path in paths])
    codes = [one.error_details and one.error_details.code for one in got]
    assert codes == ["FILE_NOT_FOUND", "INVALID_FILE_PATH", None]
    assert got[-1].result == b"here"


async def test_a_file_that_cannot_be_written_is_an_error(sandbox: AsyncSandbox) -> None:
    with pytest.raises(DaytonaError, match="400: /dev/null/x") as caught:
        await sandbox.fs.upload_files([FileUpload(source=b"", destination="/dev/null/x")])
    assert caught.value.status_code == 400
    with pytest.raises(DaytonaError, match="/tmp: "):
        await sandbox.fs.upload_file(b"", "/tmp")


async def test_an_upload_goes_through_a_link(sandbox: AsyncSandbox) -> None:
    await said(sandbox, "cd /tmp; echo old >target; ln -s target link")
    await sandbox.fs.upload_file(b"new", "/tmp/link")
    assert await said(sandbox, "cat /tmp/target; ls /tmp; test -L /tmp/link && echo link") == "newlink\ntarget\nlink\n"


async def test_directories_are_made_described_and_deleted(sandbox: AsyncSandbox) -> None:
    fs = sandbox.fs
    await fs.create_folder("/tmp/a/b", "750")
    about = await fs.get_file_info("/tmp/a/b")
    assert (about.is_dir, about.permissions, about.name) == (True, "0750", "b")
    with pytest.raises(DaytonaBadRequestError, match="recursive"):
        await fs.delete_file("/tmp/a")
    await fs.delete_file("/tmp/a", recursive=True)
    with pytest.raises(DaytonaNotFoundError):
        await fs.get_file_info("/tmp/a")
    with pytest.raises(DaytonaNotFoundError):
        await fs.delete_file("/tmp/a")
    assert await sandbox.get_user_home_dir() == "/root"
