"""Conformance suite for container backends. To test one, inherit from `ContainerContract` and define `factory`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import secrets
import stat
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import (
    Container,
    ContainerFactory,
    ContainerSpec,
    Shell,
    as_container_factory,
)
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkMode, NetworkPolicy
from ares_exp.containers.user_cache import user_cache_dir
from ares_exp.errors import ContainerDiedError, ContainerError, TransferError, UnsupportedTaskError
from ares_exp.testing.host_server import hello_server

SLACK_SEC = 30.0
"""Seconds by which a container may exceed a time limit, because the machine may be busy."""

WEIRD_NAMES = ["with space", "-dash", "it's", 'quo"te', "$(touch pwned)", "new\nline", "ünïcödé", "back\\slash", "*"]


async def alive(box: Container, what: str) -> int:
    """Counts the processes in the container whose command line is `what`, such as `sleep 4331`."""
    pattern = f"^{what} $"
    result = await box.exec(
        f"for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null | grep -c '{pattern}'"
    )
    return int(result.output.split()[-1])


async def until_alive(box: Container, what: str, count: int) -> None:
    """Waits until the container has `count` processes with the command line `what`."""
    async with asyncio.timeout(SLACK_SEC):
        while await alive(box, what) != count:  # noqa: ASYNC110 (it happens in the container)
            await asyncio.sleep(0.02)


def _ask(where: str, what: str) -> str:
    """Returns a shell command that sends an HTTP GET request for `what` to the address `where` (`host/port`)."""
    return f"exec 3<>/dev/tcp/{where} && printf 'GET {what} HTTP/1.1\\r\\n\\r\\n' >&3 && timeout 50 cat <&3"


@contextlib.contextmanager
def _files(folders: Iterable[Path], name: str, text: str) -> Iterator[list[Path]]:
    """Creates a file in each writable folder, yields the files, and finally removes everything that it created."""
    with contextlib.ExitStack() as made:
        files = []
        for folder in folders:
            with contextlib.suppress(OSError):
                for missing in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
                    missing.mkdir()
                    made.callback(_remove_if_empty, missing)
                file = folder / name
                file.write_text(text)
                made.callback(file.unlink)
                files.append(file)
        yield files


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a test that runs at the same time has a file in it
        folder.rmdir()


def _needs_isolation(factory: ContainerFactory) -> None:
    """Skips a test that needs two containers, or could harm this machine, if containers are not isolated."""
    if not as_container_factory(factory).is_isolated:
        pytest.skip("the backend declares that its containers are not isolated")


class ContainerSuite:
    """Fixtures of all suites for containers. Override `factory`, and `spec` if a container needs more than a name."""

    networks: frozenset[NetworkMode] = frozenset({"public", "no-network", "allowlist"})
    """Network modes that a container supports, and between which it can switch.

    If a task needs another mode, the backend must reject the task, or start its container without a network.
    """

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        raise NotImplementedError

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("contract")

    @pytest.fixture
    async def box(self, factory: ContainerFactory, spec: ContainerSpec) -> AsyncIterator[Container]:
        async with factory(spec) as box:
            yield box

    def with_networks(
        self, factory: ContainerFactory, spec: ContainerSpec, policies: Mapping[str, NetworkPolicy], start: NetworkMode
    ) -> ContainerSpec | None:
        """Returns a spec whose container starts with the network mode `start` and can switch to all `policies`.

        Returns `None` if the backend rejects this spec. Only a backend that does not support all modes may reject it.
        """
        asked = replace(spec, network=policies[start], phase_networks=frozenset(policies.values()))
        try:
            factory.check(asked)
        except UnsupportedTaskError:
            assert self.networks != ContainerSuite.networks
            return None
        return asked


class ContainerContract(ContainerSuite):
    """The test suite for container backends. Override `factory`, and `spec` if a container needs more than a name."""

    other_user: str | None = "nobody"
    """Name of a user in the container other than root; `None` if the container has no other user."""

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("contract", env={"FROM_SPEC": "spec", "BOTH": "spec"})

    async def test_factory_follows_the_protocols(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        assert isinstance(factory, ContainerFactory)
        assert isinstance(factory(spec), Container)

    async def test_preflight_and_check_pass(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        await factory.preflight()
        assert factory.check(spec) == []

    # Input and results of a command

    async def test_command_has_a_result(self, box: Container) -> None:
        result = await box.exec("echo out; echo err >&2; exit 7")
        assert (result.output, result.exit_code) == ("out\nerr\n", 7)
        assert (result.timed_out, result.elided_bytes) == (False, 0)
        assert 0 < result.duration_sec < SLACK_SEC

    async def test_exit_code_is_reported(self, box: Container) -> None:
        expected = {"true": 0, "false": 1, "no-such-program": 127, "kill -9 $$": 137, "kill -TERM $$": 143, "(": 2}
        assert {command: (await box.exec(command)).exit_code for command in expected} == expected

    async def test_commands_share_files_but_not_shell_state(self, box: Container) -> None:
        await box.exec("cd /tmp; X=1; export Y=2; alias ls=false; echo kept > /tmp/file; set -e")
        result = await box.exec("echo $X$Y; cat /tmp/file; false; echo on")
        assert result.output == "\nkept\non\n"

    async def test_stdin_is_empty(self, box: Container) -> None:
        assert (await box.exec("cat; echo $?", timeout_sec=SLACK_SEC)).output == "0\n"

    async def test_command_variables_override_the_spec(self, box: Container) -> None:
        value = "a b'c\"d$e\nf\\g ü"
        result = await box.exec('printf "%s|" "$FROM_SPEC" "$BOTH" "$WEIRD"', env={"BOTH": "exec", "WEIRD": value})
        assert result.output == f"spec|exec|{value}|"
        assert (await box.exec('echo "$BOTH$WEIRD"')).output == "spec\n"

    async def test_declared_environment_is_set(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        declared = "/opt/declared/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        async with factory(replace(spec, env={"PATH": declared, "DECLARED": "a  b"})) as box:
            profile = "echo 'export PATH=/usr/bin:/bin DECLARED=reset' >/etc/profile"
            is_written = (await box.exec(profile, user="root")).exit_code == 0  # the host's profile may be read-only
            await box.exec("mkdir -p /opt/declared/bin && ln -s /bin/echo /opt/declared/bin/tool", user="root")
            ask = 'echo "$PATH $DECLARED"; tool found'
            assert (await box.exec(ask)).output == f"{declared} a  b\nfound\n"
            if is_written:
                assert (await box.exec(ask, shell="bash -lc")).output.startswith("/usr/bin:/bin reset\n")

    async def test_impossible_arguments_are_refused(self, box: Container) -> None:
        every: tuple[dict[str, Any], ...] = (
            {"command": "echo \0"},
            {"command": "true", "cwd": "/\0"},
            {"command": "true", "env": {"A": "\0"}},
            {"command": "true", "env": {"A B": ""}},
        )
        for bad in every:
            with pytest.raises(ValueError, match="Expected"):
                await box.exec(**bad)

    async def test_command_runs_in_its_working_directory(self, box: Container) -> None:
        assert (await box.exec("pwd", cwd="/usr/bin")).output == "/usr/bin\n"
        missing = await box.exec("echo never", cwd="/no/such place")
        assert missing.exit_code == 126
        assert "/no/such place" in missing.output
        assert "never" not in missing.output

    async def test_spec_sets_the_working_directory(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        async with factory(ContainerSpec("contract", docker_image=spec.docker_image, workdir="/usr")) as box:
            assert (await box.exec("pwd")).output == "/usr\n"
            assert (await box.exec("pwd", cwd="bin")).output == "/usr/bin\n"
            assert (await box.exec("pwd", cwd="/")).output == "/\n"

    async def test_command_runs_as_the_user(self, box: Container) -> None:
        assert (await box.exec("id -u", user="root")).output == "0\n"
        if self.other_user is not None:
            assert (await box.exec("id -un", user=self.other_user)).output == f"{self.other_user}\n"

    async def test_unknown_user_is_refused(self, box: Container) -> None:
        with pytest.raises(ContainerError, match="no-such-user"):
            await box.exec("true", user="no-such-user")
        assert (await box.exec("echo fine")).output == "fine\n"

    async def test_unusual_directory_names_are_supported(self, box: Container) -> None:
        for name in WEIRD_NAMES:
            await box.exec('mkdir -p -- "/tmp/weird/$NAME"', env={"NAME": name})
            assert (await box.exec("pwd", cwd=f"/tmp/weird/{name}")).output == f"/tmp/weird/{name}\n"
        assert int((await box.exec("ls -b /tmp/weird | wc -l")).output) == len(WEIRD_NAMES)

    async def test_long_commands_are_supported(self, box: Container) -> None:
        for size in (90_000, 110_000, 2**20):
            result = await box.exec(f"x='{'é' * (size // 2)}'; printf '%s' \"$x\" | wc -c; exit 5", timeout_sec=60)
            assert (result.output.strip(), result.exit_code) == (str(size), 5)

    # Output

    async def test_output_may_be_any_bytes(self, box: Container) -> None:
        every_byte = "".join(f"\\{byte:03o}" for byte in range(256))
        result = await box.exec(f"printf '{every_byte}'")
        assert result.output == bytes(range(256)).decode("utf-8", "replace")
        split = await box.exec("printf '\\360\\237'; sleep 0.1; printf '\\230\\200'; sleep 0.1; printf '\\303'")
        assert split.output == "😀\ufffd"
        assert (await box.exec("printf x")).output == "x", "a newline was added"
        assert (await box.exec("true")).output == ""

    async def test_stderr_can_be_separate(self, box: Container) -> None:
        result = await box.exec("echo out; echo err >&2; printf '\\377' >&2; exit 7", separate_stderr=True)
        assert (result.output, result.stderr, result.exit_code) == ("out\n", "err\n\ufffd", 7)
        assert (await box.exec("echo err >&2")).stderr is None
        large = await box.exec("seq 1 100000 >&2; echo out", separate_stderr=True, max_output_bytes=1000)
        assert large.stderr is not None
        assert (large.output, len(large.stderr), large.elided_bytes) == ("out\n", 1000, 588_895 - 1000)
        late = await box.exec("echo out; echo err >&2; sleep 60", separate_stderr=True, timeout_sec=0.5)
        assert (late.output, late.stderr, late.timed_out) == ("out\n", "err\n", True)

    async def test_command_selects_its_shell(self, box: Container) -> None:
        ask = "shopt login_shell 2>/dev/null | grep -c on; echo ${BASH_VERSION:+bash}"
        every: tuple[Shell | None, ...] = (None, "bash -c", "sh -c", "bash -lc")
        for shell in every:
            result = await (box.exec(ask) if shell is None else box.exec(ask, shell=shell))
            login = "1\n" if shell == "bash -lc" else "0\n"
            assert result.output.startswith(login), shell
            assert shell == "sh -c" or result.output.endswith("bash\n"), shell

    async def test_output_is_cut_in_the_middle(self, box: Container) -> None:
        result = await box.exec("seq 1 100000", max_output_bytes=1000)
        whole = "".join(f"{n}\n" for n in range(1, 100001))
        assert result.output == whole[:500] + whole[-500:]
        assert result.elided_bytes == len(whole) - 1000
        assert result.exit_code == 0

    async def test_large_output_is_bounded_and_does_not_block(self, box: Container) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        flood = asyncio.gather(box.exec("yes | head -c 8388608"), box.exec("yes", timeout_sec=1))
        longest, last = 0.0, time.thread_time()  # CPU time, which does not depend on other processes
        while not flood.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        result, endless = await flood
        assert endless.timed_out
        assert result.elided_bytes == 8 * 2**20 - len(result.output)
        assert len(result.output) == 2**20
        assert set(result.output) == {"y", "\n"}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
        assert longest < 1.0

    # Time limits and cancellation

    async def test_time_limit_kills_the_process_tree(self, box: Container) -> None:
        """Tests many kinds of process trees at the same time, for example with stopped processes or ignored signals."""
        trees = {
            "4331": "sleep 4331",
            "4332": "trap '' TERM INT HUP; sleep 4332; sleep 4332",
            "4333": "setsid sh -c 'trap \"\" TERM; sleep 4333' & sleep 4333",
            "4334": "( ( sleep 4334 & ) & ); sleep 4334",
            "4335": "sleep 4335 & kill -STOP $!; wait",
            "4336": "sleep 4336 & kill -STOP $$",
            "4337": "env -i sleep 4337",
        }

        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(box.exec("true") for _ in trees))
        limit_sec = 3.0 + 5 * (asyncio.get_running_loop().time() - started)  # a busy machine starts commands late

        async def execute(command: str) -> None:
            result = await box.exec(f"echo before; {command}; echo after", timeout_sec=limit_sec)
            assert (result.output, result.exit_code, result.timed_out) == ("before\n", None, True), command
            assert limit_sec <= result.duration_sec < limit_sec + SLACK_SEC

        await asyncio.gather(*map(execute, trees.values()))
        assert {name: await alive(box, f"sleep {name}") for name in trees} == dict.fromkeys(trees, 0)
        assert (await box.exec("echo next")).output == "next\n"

    async def test_stopped_processes_time_out(self, factory: ContainerFactory, box: Container) -> None:
        _needs_isolation(factory)
        result = await box.exec("echo before; sleep 0.5; kill -STOP -1; kill -STOP $$", timeout_sec=1.5)
        assert (result.output, result.timed_out) == ("before\n", True)
        assert (await box.exec("echo next")).output == "next\n"

    async def test_time_limit_does_not_affect_other_commands(self, box: Container) -> None:
        other = asyncio.create_task(box.exec("until [ -e /tmp/late ]; do sleep 0.05; done; echo other"))
        assert (await box.exec("sleep 30", timeout_sec=0.3)).timed_out
        await box.exec("touch /tmp/late")
        assert (await other).output == "other\n"

    async def test_cancellation_kills_the_process_tree(self, box: Container) -> None:
        task = asyncio.create_task(box.exec("setsid sleep 4322 & sleep 4322"))
        await until_alive(box, "sleep 4322", 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await alive(box, "sleep 4322") == 0
        assert (await box.exec("echo next")).output == "next\n"

    # Background processes, and commands that hurt themselves

    async def test_background_process_continues_silently(self, box: Container) -> None:
        noisy = "(until [ -e /tmp/enough ]; do echo noise; sleep 0.01; done; echo > /tmp/done) &"
        result = await box.exec(f"{noisy} echo started", timeout_sec=30)
        assert result.output.endswith("started\n") or "started\n" in result.output
        assert not result.timed_out, "a command ends with its foreground process"
        for n in range(20):
            assert (await box.exec(f"echo {n}")).output == f"{n}\n"
        waited = await box.exec(
            "touch /tmp/enough; while [ ! -e /tmp/done ]; do sleep 0.05; done; echo seen", timeout_sec=30
        )
        assert waited.output == "seen\n"

    async def test_background_process_does_not_block_a_command(self, box: Container) -> None:
        result = await box.exec("sleep 4323 & echo $!", timeout_sec=SLACK_SEC)
        assert not result.timed_out
        assert await alive(box, "sleep 4323") == 1
        gone = await box.exec(
            f"kill {result.output}; while kill -0 {result.output}; do sleep 0.05; done", timeout_sec=SLACK_SEC
        )
        assert not gone.timed_out, "a killed process stays as a zombie"

    async def test_closed_output_ends_the_command(self, box: Container) -> None:
        assert (await box.exec("echo seen; exec 1>&- 2>&-; echo lost; exit 4")).exit_code in (1, 4)
        assert (await box.exec("echo next")).output == "next\n"

    async def test_killed_shell_has_a_defined_result(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        killers = ["kill -9 $PPID", "kill -9 0"]
        if as_container_factory(factory).is_isolated:
            killers += ["kill -9 -1", "kill -TERM -- -1"]
        async with contextlib.AsyncExitStack() as boxes:
            box = await boxes.enter_async_context(factory(spec))
            for command in (*killers, "kill -9 $(cut -d' ' -f4 /proc/$PPID/stat)"):
                try:
                    result = await box.exec(f"echo before; {command}; sleep 0.1", timeout_sec=30)
                    assert not result.timed_out, command
                    assert isinstance(result.exit_code, int), command
                    assert (await box.exec("echo next")).output == "next\n", command
                except ContainerDiedError:  # the command may end the container, which must then raise this error
                    box = await boxes.enter_async_context(factory(spec))

    async def test_many_commands_run_concurrently(self, box: Container) -> None:
        started = time.monotonic()
        results = await asyncio.gather(*(box.exec(f"sleep 0.5; echo {n}") for n in range(64)))
        assert [result.output for result in results] == [f"{n}\n" for n in range(64)]
        assert time.monotonic() - started < 64 * 0.5

    # Files

    async def test_file_is_uploaded(self, box: Container, tmp_path: Path) -> None:
        source = tmp_path / "script"
        source.write_bytes(b"#!/bin/sh\necho ran\n")
        source.chmod(0o750)
        await box.upload(source, "/new/parents/run.sh")
        result = await box.exec("stat -c '%a %u %g' /new/parents/run.sh; /new/parents/run.sh")
        assert result.output == "750 0 0\nran\n"
        source.write_bytes(b"#!/bin/sh\necho again\n")
        await box.upload(str(source), "/new/parents/run.sh")
        assert (await box.exec("/new/parents/run.sh")).output == "again\n"
        await box.exec("mkdir /real; ln -s real /linked")
        await box.upload(source, "/linked/file")
        left = await box.exec("readlink /linked; cat /real/file")
        assert left.output == "real\n#!/bin/sh\necho again\n", "a link of the container was replaced"

    async def test_directory_is_uploaded(self, box: Container, tmp_path: Path) -> None:
        (tmp_path / "sub" / "empty").mkdir(parents=True)
        (tmp_path / "sub" / "file").write_text("text")
        (tmp_path / "sub" / "file").chmod(0o604)
        (tmp_path / "link").symlink_to("sub/file")
        (tmp_path / "dangling").symlink_to("/no/such")
        for n, name in enumerate(WEIRD_NAMES):
            (tmp_path / name).write_text(str(n))
        await box.exec("mkdir -p /into; chmod 1777 /into; echo stays > /into/other")
        await box.upload(tmp_path, "/into")
        result = await box.exec(
            "stat -c %a . sub/file; cat other link; echo; readlink link dangling; ls -d sub/empty; ls -b | wc -l",
            cwd="/into",
        )
        expected = f"1777\n604\nstays\ntext\nsub/file\n/no/such\nsub/empty\n{len(WEIRD_NAMES) + 4}\n"
        assert result.output.replace("     ", "") == expected

    async def test_many_small_and_large_files_are_uploaded(self, box: Container, tmp_path: Path) -> None:
        (tmp_path / "many").mkdir()
        for n in range(50):
            (tmp_path / "many" / f"file{n}").write_text(str(n))
        await box.upload(tmp_path / "many", "/many")
        assert (await box.exec("cat $(ls -v /many/*) | md5sum")).output.split()[0] == hashlib.md5(
            "".join(map(str, range(50))).encode(), usedforsecurity=False
        ).hexdigest()
        data = bytes(range(256)) * 40_000
        (tmp_path / "large").write_bytes(data)
        await box.upload(tmp_path / "large", "/large")
        await box.download("/large", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data

    async def test_directory_is_downloaded(self, box: Container, tmp_path: Path) -> None:
        await box.exec(
            "mkdir -p /out/sub/empty; printf text > /out/sub/file; chmod 750 /out/sub/file; ln -s sub/file /out/link;"
            "ln /out/sub/file /out/hard; printf '\\0\\377' > '/out/we ird'"
        )
        (tmp_path / "into").mkdir()
        (tmp_path / "into" / "other").write_text("stays")
        await box.download("/out", tmp_path / "into")
        found = sorted(str(path.relative_to(tmp_path / "into")) for path in (tmp_path / "into").rglob("*"))
        assert found == ["hard", "link", "other", "sub", "sub/empty", "sub/file", "we ird"]
        assert (tmp_path / "into" / "link").readlink() == Path("sub/file")
        assert (tmp_path / "into" / "link").read_text() == (tmp_path / "into" / "hard").read_text() == "text"
        assert (tmp_path / "into" / "we ird").read_bytes() == b"\0\xff"
        assert stat.S_IMODE((tmp_path / "into" / "sub" / "file").stat().st_mode) == 0o750

    async def test_file_is_downloaded(self, box: Container, tmp_path: Path) -> None:
        await box.exec("printf one > /one; ln -s one /two")
        await box.download("/one", tmp_path / "new" / "a")
        await box.download("/two", str(tmp_path / "new" / "b"))
        assert (tmp_path / "new" / "a").read_text() == (tmp_path / "new" / "b").read_text() == "one"
        assert not (tmp_path / "new" / "b").is_symlink()

    async def test_missing_files_cannot_be_transferred(self, box: Container, tmp_path: Path) -> None:
        with pytest.raises(TransferError, match="/no/such"):
            await box.download("/no/such", tmp_path / "x")
        assert not (tmp_path / "x").exists()
        with pytest.raises(TransferError, match="missing"):
            await box.upload(tmp_path / "missing", "/x")

    async def test_downloads_stay_inside_the_target(self, box: Container, tmp_path: Path) -> None:
        await box.exec(
            "mkdir -p /evil/d; cd /evil; ln -s /etc/passwd absolute; ln -s ../../secret relative; mkfifo fifo;"
            "ln -s . self; ln -s self/../../secret chained; ln -s ../ok d/fine; echo fine > ok"
        )
        (tmp_path / "secret").write_text("host")
        await box.download("/evil", tmp_path / "a" / "into")
        into = tmp_path / "a" / "into"
        assert sorted(path.name for path in into.iterdir()) == ["d", "ok", "self"]
        assert (into / "d" / "fine").read_text() == "fine\n"

    # Network

    @pytest.mark.parametrize("start", ["no-network", "public", "allowlist"])
    async def test_network_follows_the_policy(
        self, factory: ContainerFactory, spec: ContainerSpec, start: NetworkMode
    ) -> None:
        async with hello_server() as (address, port):
            allowlist = NetworkPolicy("allowlist", frozenset({address}))
            policies = {"no-network": NO_NETWORK, "public": PUBLIC, "allowlist": allowlist}
            if (asked := self.with_networks(factory, spec, policies, start)) is None:
                return
            async with factory(asked) as box:
                for mode in (start, "no-network", "public", "allowlist", "public", "no-network", "allowlist", start):
                    await box.set_network(policies[mode])
                    offered = mode in self.networks
                    straight = await box.exec(_ask(f"{address}/{port}", "/"), timeout_sec=60)
                    assert ("hello" in straight.output) == (offered and mode == "public")
                    relayed = await box.exec(
                        f"p=${{http_proxy#http://}}; {_ask('${p%:*}/${p##*:}', f'http://{address}:{port}/')}",
                        timeout_sec=60,
                    )
                    assert ("hello" in relayed.output) == (offered and mode == "allowlist")

    async def test_unannounced_policy_is_refused(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        async with factory(replace(spec, network=NO_NETWORK)) as box:
            await box.set_network(NO_NETWORK)
            with pytest.raises(ValueError, match=r"Expected one of the .*policies"):
                await box.set_network(PUBLIC)

    # Contents that a container must not have

    async def test_home_keys_runs_and_cache_are_unreachable(
        self, factory: ContainerFactory, spec: ContainerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _needs_isolation(factory)
        name = f"ares_exp-contract-{secrets.token_hex(8)}"
        key = f"key-{secrets.token_hex(8)}"
        monkeypatch.setenv("ARES_EXP_CONTRACT_API_KEY", key)
        folders = (
            Path.home(),
            Path.home() / ".ssh",
            user_cache_dir() / "contract",
            Path.cwd(),
            tmp_path / "outputs" / "run",
        )
        with _files(folders, name, key) as files:
            assert files
            async with factory(spec) as other, factory(spec) as box:
                await other.exec(f"echo {key} >/tmp/{name}; mkdir -p /home/{name}; (sleep 100; : {key}) &", user="root")
                for file in files:
                    reach = f"cat {file}; mkdir -p {file.parent} && echo written >{file}; rm -rf {file}"
                    assert key not in (await box.exec(reach, user="root", timeout_sec=SLACK_SEC)).output
                    assert file.read_text() == key
                elsewhere = "\\( -path '/proc/*' -o -path '/sys/*' -o -path '/usr/*' \\) -prune"
                by_process = " ".join(f"$p/{place}/{name}" for place in ("cwd", "root/tmp", "fd/*"))
                look = f"find / {elsewhere} -o -name {name} -print; for p in /proc/[0-9]*; do ls -d {by_process}; done"
                read = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'"
                seen = await box.exec(f"{{ {look}; {read}; }} 2>/dev/null", user="root", timeout_sec=SLACK_SEC)
                assert key not in seen.output
                assert [line for line in seen.output.splitlines() if line.endswith(f"/{name}")] == []
                assert (await other.exec(f"cat /tmp/{name}", user="root")).output == f"{key}\n"

    # Lifetime

    async def test_stop_is_idempotent_and_commands_are_refused(
        self, factory: ContainerFactory, spec: ContainerSpec, tmp_path: Path
    ) -> None:
        box = factory(spec)
        await box.stop()
        box = factory(spec)
        await box.start()
        running = asyncio.create_task(box.exec("sleep 100"))
        await until_alive(box, "sleep 100", 1)
        started = time.monotonic()
        await box.stop()
        assert time.monotonic() - started < SLACK_SEC
        await box.stop()
        with pytest.raises(ContainerDiedError):
            await running
        with pytest.raises(ContainerDiedError):
            await box.exec("true")
        with pytest.raises(ContainerError):
            await box.download("/etc/hostname", tmp_path / "x")

    async def test_containers_are_isolated(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        _needs_isolation(factory)
        async with factory(spec) as one, factory(spec) as two:
            await one.exec("echo one > /tmp/mine")
            assert (await two.exec("cat /tmp/mine 2>/dev/null; echo $?")).output == "1\n"
