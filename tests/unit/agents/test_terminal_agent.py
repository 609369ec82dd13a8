import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.terminal_agent import TerminalAgentFactory, TerminalScreen, as_typed, cut_bytes, read_reply
from ares_exp.containers.container import ContainerSpec, TerminalOutput
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.terminal import KEPT_BYTES, TerminalSession
from ares_exp.errors import AgentError, RepeatedFormatError
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.testing.echo_container import RehearsalContainer
from tests.unit.agents.scripted_model import Model

pytest.importorskip("pyte")


class Scripted(RehearsalContainer):
    """Its terminal prints what a function makes of the keys."""

    def __init__(
        self, prints: Callable[[str], str] = lambda keys: f"{keys.replace(chr(13), chr(13) + chr(10))}$ "
    ) -> None:
        super().__init__()
        self.typed: list[tuple[str, float]] = []
        self.ended = True
        self._prints = prints

    async def use_terminal(self, keys: str, *, seconds: float, columns: int, lines: int) -> TerminalOutput:
        is_new, self.ended = self.ended, False
        if keys or not is_new:
            self.typed.append((keys, seconds))
            return TerminalOutput(("$ " if is_new else "") + self._prints(keys), is_new)
        return TerminalOutput("$ ", is_new)


def keys(*typed: tuple[str, float], done: bool = False) -> str:
    commands = [{"keystrokes": one, "duration": seconds} for one, seconds in typed]
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})


DONE = keys(done=True)


async def work(container: Any, *replies: str | LLMResponse, **options: Any) -> tuple[Model, Any]:
    model = Model(*replies)
    agent = TerminalAgentFactory(**options)(container=container, llm_client=model)
    await agent.run("Do it.")
    return model, agent


async def test_keys_are_typed_with_bounded_waits() -> None:
    box = Scripted()
    first = keys(("ls\n", 0.1), ("C-c", 900), ("", -1), ("a", float("nan")))
    await work(box, first, DONE, DONE, max_wait_sec=30)
    assert box.typed == [("ls\r", 0.1), ("\x03", 30.0), ("", 0.0), ("a", 1.0)]


async def test_first_message_contains_task_and_screen() -> None:
    model, _ = await work(Scripted(), DONE, DONE, columns=100)
    [message] = model.requests[0].messages
    assert model.requests[0].system_prompt is None
    assert "Do it." in message["content"]
    assert "100 columns" in message["content"]
    assert message["content"].rstrip().endswith("Current Terminal Screen:\n$")


async def test_new_output_is_shown_before_the_screen() -> None:
    model, _ = await work(
        Scripted(lambda keys: f"{keys}\nout\r\n$ " if keys else ""), keys(("ls", 1)), keys(), DONE, DONE
    )
    assert model.told[1] == "New Terminal Output:\n$ ls\n  out\n$\n".replace("\n  out", "\n    out")
    assert model.told[2].startswith("New Terminal Output:\n")


async def test_task_is_complete_after_two_confirmations() -> None:
    model, _ = await work(Scripted(), DONE, keys(("ls\n", 1)), DONE, DONE)
    sure = "Are you sure you want to mark the task as complete?"
    assert [sure in told for told in model.told] == [False, True, False, True]


async def test_unreadable_reply_is_explained_and_types_no_keys() -> None:
    box = Scripted()
    model, agent = await work(box, "Hm.", DONE, '{"analysis": "', DONE)
    assert model.told[1] == (
        "Previous response had parsing errors:\nERROR: No valid JSON found in response\n"
        "WARNINGS: - No valid JSON object found\n\nPlease fix these issues and provide a proper JSON response."
    )
    assert (agent.format_errors, box.typed) == (2, [])
    with pytest.raises(RepeatedFormatError, match="2 replies in a row"):
        await work(Scripted(), "Hm.", "Hm.", format_errors_in_a_row=2)


async def test_warnings_precede_the_output() -> None:
    model, _ = await work(Scripted(), f"So: {keys(('ls', 1))}", DONE, DONE)
    expected = (
        "Previous response had warnings:\nWARNINGS: - Extra text detected before JSON object\n\nNew Terminal Output:"
    )
    assert model.told[1].startswith(expected)


async def test_ended_terminal_is_reported_once() -> None:
    box = Scripted()

    def ends(keys: str) -> str:
        box.ended = keys == "exit\r"
        return keys

    box._prints = ends
    model, _ = await work(box, keys(("exit\n", 1), ("ls\n", 1)), keys(), DONE, DONE)
    assert ["The terminal has ended" in told for told in model.told] == [False, True, False, False]
    assert box.typed == [("exit\r", 1.0), ("ls\r", 1.0)]


async def test_long_outputs_are_cut_in_the_middle() -> None:
    model, _ = await work(Scripted(lambda _: "line\r\n" * 5000), keys(("x", 1)), DONE, DONE, max_output_bytes=1000)
    assert "interior bytes omitted" in model.told[1]
    assert len(model.told[1].encode()) < 1100
    assert cut_bytes("ü" * 100, 101).startswith("ü" * 25 + "\n[... output limited to 101 bytes; 100 interior")
    assert cut_bytes("ü" * 50, 100) == "ü" * 50


async def test_summary_is_followed_by_the_screen() -> None:
    step = LLMResponse.from_text(keys(("ls\n", 1)), usage=Usage(2000, 10))
    model, _ = await work(Scripted(), step, step, "Much was done.", DONE, DONE, compaction_tokens=1000)
    [after] = model.requests[3].messages
    assert "Much was done." in after["content"]
    assert after["content"].rstrip().endswith("Current Terminal Screen:\n$ ls\n$ ls\n$")


async def test_container_without_a_terminal_is_refused() -> None:
    class Bare:
        async def exec(self, command: str, **_: Any) -> Any: ...
        async def upload(self, source: Any, target: Any) -> None: ...
        async def download(self, source: Any, target: Any) -> None: ...

    with pytest.raises(AgentError, match="Bare does not have one"):
        await work(Bare())


class TestScreen:
    def test_scrolled_lines_count_as_new_output(self) -> None:
        screen = TerminalScreen(20, 5)
        screen.feed("$ ")
        screen.news()
        screen.feed("seq 9\r\n" + "".join(f"{n}\r\n" for n in range(1, 10)) + "$ ")
        assert screen.news() == "New Terminal Output:\n$ seq 9\n1\n2\n3\n4\n5\n6\n7\n8\n9\n$\n"
        assert screen.visible == "6\n7\n8\n9\n$\n"

    def test_full_screen_program_uses_the_alternate_screen(self) -> None:
        screen = TerminalScreen(20, 5)
        screen.feed("$ vi")
        screen.news()
        screen.feed("\x1b[?1049h\x1b[?1h\x1b[H\x1b[2J~\r\n漢字 ü")
        assert (screen.news(), screen.application_cursor) == ("Current Terminal Screen:\n~\n漢字 ü\n", True)
        screen.feed("\x1b[?1049l\x1b[?1l\r\n$ ")
        assert (screen.visible, screen.application_cursor) == ("$ vi\n$\n", False)

    def test_cleared_screen_is_shown(self) -> None:
        screen = TerminalScreen(20, 5)
        screen.feed("one\r\ntwo")
        screen.news()
        screen.feed("\x1b[H\x1b[2Jthree")
        assert screen.news() == "Current Terminal Screen:\nthree\n"


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Any]:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    async with LocalContainerFactory()(ContainerSpec("terminal", context_dir=tmp_path, workdir="/tmp")) as container:
        yield container


async def until(session: TerminalSession, text: str, keys: str = "") -> str:
    seen = await session.type_keys(keys, 0.05)
    while text not in seen and not session.has_ended:
        seen += await session.type_keys("", 0.05)
    return seen


@pytest.mark.local
async def test_terminal_of_a_container_works(box: Any) -> None:
    session = TerminalSession(await box.open_terminal(columns=90, lines=25, env={"MINE": "a b"}))
    try:
        seen = await until(session, "tail", "stty size; pwd; echo $MINE $TERM; tty; echo ta''il\r")
        for line in ("25 90", "/tmp", "a b xterm-256color", "/dev/pts/0"):
            assert f"{line}\r\n" in seen
        await until(session, "cat\r\n", "cat\r")
        await until(session, "started\r\nstarted\r\n", "started\r")
        await until(session, "# ", "\x03")
        await until(session, "stopped", "echo stop''ped\r")
        await until(session, "end\r\n", "head -c 999999 /dev/zero | tr '\\0' x | fold -w 99; echo e''nd\r")
    finally:
        await session.close()
        await session.close()


async def test_printed_output_is_bounded() -> None:
    class Flood:
        left = 100

        async def read(self) -> bytes:
            self.left -= 1
            return b"" if self.left < 0 else b"\xc3" + b"x" * 99_999

        async def write(self, data: bytes) -> None:
            raise OSError("gone")

        async def close(self) -> None: ...

    session = TerminalSession(Flood())
    text = await session.type_keys("typed", 60)
    assert f"[{100 * 100_002 - KEPT_BYTES} bytes left out]" in text
    assert text.startswith("\ufffdxxx")
    assert session.has_ended
    await session.close()


@pytest.mark.local
async def test_terminal_ends_with_its_shell_and_jobs(box: Any) -> None:
    session = TerminalSession(await box.open_terminal(columns=80, lines=24))
    await until(session, "[1]", "sleep 1000 &\r")
    await until(session, "it ends before it says this", "exit\r")
    assert session.has_ended
    await session.close()
    session = TerminalSession(await box.open_terminal(columns=80, lines=24))
    await until(session, "sleep 2000\r\n", "sleep 2000\r")
    await session.close()
    gone = "while grep -qa 2000 /proc/[0-9]*/cmdline 2>/dev/null; do sleep 0.05; done; echo gone"
    assert (await box.exec(gone.replace("2000", "200[0]"), timeout_sec=20)).output == "gone\n"


RECORDED = Path(__file__).parents[2] / "data" / "terminus_replies.json"
"""Replies, and how Harbor's parsers read them (its field `source`)."""


def as_recorded(reply: str) -> dict[str, Any]:
    read = read_reply(reply)
    commands = [[keys.text, keys.seconds] for keys in read.commands]
    warnings = list(read.warnings)
    return {"commands": commands, "is_complete": read.is_complete, "error": read.error, "warnings": warnings}


def without_parser(fields: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the words of Python's JSON parser, which differ between versions."""
    return {**fields, "error": re.sub(r"^(Invalid JSON: ).*?(?= \| Content: )", r"\1", fields["error"])}


def test_replies_are_parsed_like_in_harbor() -> None:
    recorded = json.loads(RECORDED.read_text())["replies"]
    assert len(recorded) > 30
    for one in recorded:
        found = as_recorded(one["reply"])
        assert without_parser(found) == without_parser({key: one[key] for key in found})


def test_deeply_nested_reply_is_an_error() -> None:
    read = read_reply("{" * 5000 + "}" * 5000)
    assert read.error.startswith("Invalid JSON")
    assert (read.commands, read.is_complete) == ((), False)


@pytest.mark.parametrize(
    ("keys", "typed"),
    [("ls\n", "ls\r"), ("C-c", "\x03"), ("C-d", "\x04"), ("^C", "\x03"), ("M-x", "\x1bx"), ("Escape", "\x1b"),
     ("Up", "\x1b[A"), ("F5", "\x1b[15~"), ("C-c\n", "C-c\r"), ("Update", "Update"), ("", ""), ("C-", "C-")],
)  # fmt: skip
def test_keys_are_translated(keys: str, typed: str) -> None:
    assert as_typed(keys, application_cursor=False) == typed
    assert as_typed("Up", application_cursor=True) == "\x1bOA"
