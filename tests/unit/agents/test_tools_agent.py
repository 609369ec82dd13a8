import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.tools_agent import ToolsAgentFactory
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ConfigError, RepeatedFormatError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData, Usage
from ares_exp.testing.check_agent import check_agent
from ares_exp.testing.echo_container import RehearsalContainer
from tests.unit.agents.scripted_model import Model

SUBMIT = ("submit", {})


def calls(*wanted: tuple[str, Any], text: str = "", tokens: int = 0) -> LLMResponse:
    pieces = [
        ToolCallData(f"id{n}", name, given if isinstance(given, str) else json.dumps(given))
        for n, (name, given) in enumerate(wanted)
    ]
    return LLMResponse([*([TextData(text)] if text else []), *pieces], usage=Usage(tokens, 0))


async def work(container: Any, *replies: LLMResponse, **options: Any) -> tuple[Model, Any]:
    model = Model(*replies)
    agent = ToolsAgentFactory(**options)(container=container, llm_client=model)
    await agent.run("Do it.")
    return model, agent


def results(request: LLMRequest) -> list[str]:
    last = max(place for place, message in enumerate(request.messages) if message["role"] == "assistant")
    return [message["content"] for message in request.messages[last + 1 :]]


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Any]:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    async with LocalContainerFactory()(ContainerSpec("tools", context_dir=tmp_path)) as container:
        yield container


async def edits(box: Any, *given: dict[str, Any]) -> list[str]:
    model, _ = await work(box, calls(*(("edit", one) for one in given)), calls(SUBMIT))
    return results(model.requests[1])


@pytest.mark.local
async def test_parallel_calls_are_executed_in_order(box: Any) -> None:
    first = calls(
        ("bash", {"command": "sleep 0.2; echo one > /tmp/a"}),
        ("edit", {"command": "str_replace", "path": "/tmp/a", "old_str": "one", "new_str": "two"}),
        ("bash", {"command": "cat /tmp/a; exit 3"}),
        text="Now.",
    )
    model, agent = await work(box, first, calls(SUBMIT, ("bash", {"command": "echo no > /tmp/a"})))
    asked = model.requests[1].messages
    assert [message.get("tool_call_id") for message in asked[2:]] == ["id0", "id1", "id2"]
    assert asked[1]["content"] == "Now."
    assert [call["function"]["name"] for call in asked[1]["tool_calls"]] == ["bash", "edit", "bash"]
    assert asked[4]["content"] == "<exit_code>3</exit_code>\n<output>\ntwo\n\n</output>"
    assert (await box.exec("cat /tmp/a")).output == "two\n"  # nothing is done after a submit
    assert agent.format_errors == 0
    assert [tool["function"]["name"] for tool in model.requests[0].tools or ()] == ["bash", "edit", "submit"]


@pytest.mark.local
async def test_files_are_created_changed_and_viewed(box: Any) -> None:
    text = "first\n\tünï $x `y` 'z' \"q\" \\n\nlast"
    told = await edits(
        box,
        {"command": "create", "path": "/tmp/new dir/it's", "file_text": text},
        {"command": "view", "path": "/tmp/new dir/it's"},
        {"command": "view", "path": "/tmp/new dir/it's", "view_range": [2, 2]},
        {"command": "insert", "path": "/tmp/new dir/it's", "insert_line": 3, "insert_text": "more"},
        {"command": "insert", "path": "/tmp/new dir/it's", "insert_line": 0, "new_str": "top\n"},
        {"command": "str_replace", "path": "/tmp/new dir/it's", "old_str": "first\n"},
        {"command": "view", "path": "/tmp/new dir"},
        {"command": "create", "path": "/tmp/new dir/empty", "file_text": ""},
        {"command": "view", "path": "/tmp/new dir/empty"},
    )
    assert told[1] == "     1\tfirst\n     2\t\tünï $x `y` 'z' \"q\" \\n\n     3\tlast"
    assert told[2] == "     2\t\tünï $x `y` 'z' \"q\" \\n"
    assert told[3].endswith("     3\tlast\n     4\tmore")
    assert told[6].splitlines() == ["/tmp/new dir", "/tmp/new dir/it's"]
    assert told[8] == "/tmp/new dir/empty is empty."
    shown = await box.exec('cat "/tmp/new dir/it\'s"')
    assert shown.output == "top\n\tünï $x `y` 'z' \"q\" \\n\nlast\nmore\n"


@pytest.mark.local
async def test_impossible_edit_changes_no_files(box: Any) -> None:
    await box.exec("printf 'a\\nb\\na\\n' > /tmp/f; printf '\\377' > /tmp/binary; mkdir /tmp/d; chmod 640 /tmp/f")
    told = await edits(
        box,
        {"command": "str_replace", "path": "/tmp/f", "old_str": "a", "new_str": "c"},
        {"command": "str_replace", "path": "/tmp/f", "old_str": "A", "new_str": "c"},
        {"command": "str_replace", "path": "/tmp/f"},
        {"command": "insert", "path": "/tmp/f", "insert_line": 4, "insert_text": "x"},
        {"command": "view", "path": "/tmp/f", "view_range": [2, 9]},
        {"command": "view", "path": "/tmp/none"},
        {"command": "view", "path": "/tmp/binary"},
        {"command": "create", "path": "/tmp/d", "file_text": "x"},
        {"command": "create", "path": "/tmp/g", "file_text": "\0"},
        {"command": "remove", "path": "/tmp/f"},
    )
    assert all(one.startswith("<error>") for one in told)
    expected = (
        *("2 times in /tmp/f, on lines 1, 3", "old_str is not in", "needs `old_str`", "from 0 to 3"),
        *("first <= last <= 3", "No such file", "not UTF-8 text", "could not be written", "NUL"),
        "Input should be 'view', 'create'",
    )
    for one, words in zip(told, expected, strict=True):
        assert words in one, one
    assert (await box.exec("cat /tmp/f; stat -c %a /tmp/f; ls /tmp/d")).output == "a\nb\na\n640\n"


@pytest.mark.local
async def test_edit_preserves_owner_and_mode(box: Any) -> None:
    await box.exec("echo a > /tmp/x; chmod 751 /tmp/x; ln -s x /tmp/link")
    await edits(box, {"command": "str_replace", "path": "/tmp/link", "old_str": "a", "new_str": "b"})
    assert (await box.exec("stat -c '%a %U' /tmp/x; cat /tmp/x; readlink /tmp/link")).output == "751 root\nb\nx\n"


@pytest.mark.local
async def test_model_sets_the_time_limit_within_bounds(box: Any) -> None:
    slow = [("bash", {"command": "sleep 60", "timeout_sec": seconds}) for seconds in (0.1, 1000)]
    model, _ = await work(box, calls(*slow), calls(SUBMIT), max_command_timeout_sec=0.3)
    assert ["after 0.1 seconds" in (told := results(model.requests[1]))[0], "after 0.3 seconds" in told[1]] == [
        True
    ] * 2


def rehearsal() -> RehearsalContainer:
    return RehearsalContainer(lambda command: command.removeprefix("echo "))


async def test_replies_without_usable_calls_are_limited() -> None:
    unusable = [
        LLMResponse.from_text("I am thinking."),
        calls(("bash", "{not json"), ("delete", {})),
        calls(("bash", {"cmd": "ls"})),
    ]
    model, agent = await work(rehearsal(), *unusable, calls(SUBMIT), format_errors_in_a_row=4)
    assert agent.format_errors == 3
    assert "Expected a call of a tool" in results(model.requests[1])[0]
    told = results(model.requests[2])
    assert "not valid JSON" in told[0]
    assert "There is no tool 'delete'. The tools are: bash, edit, submit." in told[1]
    assert "command: Field required" in results(model.requests[3])[0]
    with pytest.raises(RepeatedFormatError, match="3 replies in a row had no usable tool call"):
        await work(rehearsal(), *unusable)


async def test_calls_without_ids_get_generated_ids() -> None:
    same = LLMResponse(
        [ToolCallData("", "bash", '{"command": "echo a"}'), ToolCallData("", "bash", '{"command": "b"}')]
    )
    model, _ = await work(rehearsal(), same, calls(SUBMIT))
    asked = model.requests[1].messages
    assert [call["id"] for call in asked[1]["tool_calls"]] == ["call_0", "call_1"]
    assert [message["tool_call_id"] for message in asked[2:]] == ["call_0", "call_1"]


async def test_only_listed_tools_are_offered() -> None:
    done = calls(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
    model, _ = await work(rehearsal(), done, tools=["bash"])
    assert [tool["function"]["name"] for tool in model.requests[0].tools or ()] == ["bash"]
    assert "echo COMPLETE_TASK_AND_SUBMIT" in model.requests[0].messages[-1]["content"]
    model, _ = await work(rehearsal(), done, calls(SUBMIT))
    assert "COMPLETE_TASK" in results(model.requests[1])[0]  # an output like any other
    with pytest.raises(ConfigError, match="bash or submit"):
        ToolsAgentFactory(tools=["edit"])


class TestCompaction:
    long = "x" * 1000

    async def test_old_outputs_are_dropped(self) -> None:
        step = calls(("bash", {"command": f"echo {self.long}"}))
        replies = [*[step] * 4, calls(SUBMIT)]
        options = {"compaction": "drop_outputs", "compaction_keeps": 1, "compaction_tokens": 1400}
        model, _ = await work(rehearsal(), *replies, **options)
        outputs = [[m["content"] for m in r.messages if m["role"] == "tool"] for r in model.requests]
        assert ["output of" in one for one in outputs[-2]] == [True, True, False]
        assert [len(one) for one in outputs] == [0, 1, 2, 3, 4]
        assert await check_agent(ToolsAgentFactory(**options), replies=replies, container=rehearsal()) == 5

    async def test_summary_replaces_all_except_the_task(self) -> None:
        step = calls(("bash", {"command": "echo a"}), tokens=2000)
        replies = [*[step] * 2, LLMResponse.from_text("It is in /app.", usage=Usage(3000, 5)), step, calls(SUBMIT)]
        options = {"compaction": "summarise", "compaction_tokens": 1000}
        model, _ = await work(rehearsal(), *replies, **options)
        asked, after = model.requests[2], model.requests[3]
        assert asked.tool_choice == "none"
        assert "will be replaced by a summary" in asked.messages[-1]["content"]
        assert len(after.messages) == 1
        assert "Do it." in after.messages[0]["content"]
        assert "It is in /app." in after.messages[0]["content"]
        assert after.tools == model.requests[0].tools
        assert after.tool_choice is None
        assert len(model.requests[4].messages) == 3  # what was counted before says nothing of it
        assert await check_agent(ToolsAgentFactory(**options), replies=replies, container=rehearsal()) == 5

    async def test_failed_summary_drops_old_outputs(self) -> None:
        step = calls(("bash", {"command": f"echo {self.long}"}), tokens=2000)
        replies = [*[step] * 2, LLMResponse.from_text(" "), calls(SUBMIT)]
        model, _ = await work(rehearsal(), *replies, compaction="summarise", compaction_tokens=1000, compaction_keeps=0)
        assert ["output of" in m["content"] for m in model.requests[3].messages if m["role"] == "tool"] == [True] * 2
