import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ares_exp.agents.mcp_tools import McpTools
from ares_exp.agents.tool_calls import McpCall, ToolError, UnusableCall, read_call
from ares_exp.agents.tools_agent import ToolsAgentFactory
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import AgentError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, ToolCallData
from ares_exp.tasks.task_contract import AgentContext
from ares_exp.tasks.task_toml import McpServer
from ares_exp.testing.check_agent import check_agent
from ares_exp.testing.echo_container import RehearsalContainer

SERVER = Path(__file__).parents[2] / "data" / "agents" / "mcp_server.py"
STDIO = McpServer(name="my counter", transport="stdio", command="python3", args=("/srv.py",))
HTTP = McpServer(name="web", transport="streamable-http", url="http://127.0.0.1:8123/mcp", headers={"X-A": "it's"})
ADD = "mcp__my_counter__add_it"

pytestmark = pytest.mark.local


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    context = tmp_path_factory.mktemp("mcp")
    (context / "Dockerfile").write_text("FROM python:3.12-slim\n")
    async with LocalContainerFactory()(ContainerSpec("mcp", context_dir=context)) as container:
        await container.upload(SERVER, "/srv.py")
        yield container


async def opened(box: Any, *servers: McpServer, timeout_sec: float = 60) -> McpTools:
    tools = McpTools(box, timeout_sec=timeout_sec)
    await tools.open(servers)
    return tools


@pytest.mark.asyncio(loop_scope="module")
async def test_server_in_the_container_works(box: Any) -> None:
    tools = await opened(box, STDIO)
    [add, die] = [one["function"] for one in tools.definitions]
    assert (add["name"], add["description"], add["parameters"]["required"]) == (ADD, "Adds.", ["by"])
    assert await tools.call(McpCall(ADD, {"by": 2})) == "2 ünits\n[image image/png]"
    assert (await tools.call(McpCall(ADD, {"by": 3}))).startswith("5 ")
    assert (await tools.call(McpCall(ADD, {"by": 1, "more": "'x' \n" * 40_000}))).startswith("6 ")
    with pytest.raises(ToolError, match="by is no number"):
        await tools.call(McpCall(ADD, {}))
    with pytest.raises(ToolError, match="I die"):
        await tools.call(McpCall(die["name"], {}))
    told = await tools.call(McpCall(ADD, {"by": 1}))
    assert told.startswith("(The server was restarted, so the data in its memory is lost.)\n1 ")


@pytest.mark.asyncio(loop_scope="module")
async def test_reused_process_number_of_server_is_spared(box: Any) -> None:
    folder = "/tmp/.ares_exp_mcp/0"  # as in a container that was restored
    other = f"rm -rf {folder}; mkdir -p {folder}; mkfifo {folder}/in; sleep 4321 & echo $! >{folder}/pid"
    await box.exec(f"{{ {other}; }} </dev/null >/dev/null 2>&1; cp {folder}/pid /other", timeout_sec=60)
    tools = await opened(box, STDIO)
    assert (await tools.call(McpCall(ADD, {"by": 7}))).startswith("7 ")
    assert (await box.exec("kill $(cat /other)", timeout_sec=60)).exit_code == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_server_over_http_works(box: Any) -> None:
    connect = "import socket; socket.create_connection(('127.0.0.1', 8123))"
    until = f'until python3 -c "{connect}" 2>/dev/null; do sleep 0.1; done'
    await box.exec(f"python3 /srv.py 8123 >/dev/null 2>&1 & {until}", timeout_sec=60)
    tools = await opened(box, HTTP)
    assert (await tools.call(McpCall("mcp__web__add_it", {"by": 4}))).startswith("4 ünits")
    assert (await tools.call(McpCall("mcp__web__add_it", {"by": 4}))).startswith("8 ünits")

    class WithoutCurl:
        async def exec(self, command: str, **options: Any) -> Any:
            return await box.exec(command.replace("curl", "nosuch"), **options)

    tools = await opened(WithoutCurl(), HTTP)
    assert (await tools.call(McpCall("mcp__web__add_it", {"by": 4}))).startswith("12 ünits")


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (McpServer(name="a", transport="stdio", command="nosuch"), "'a' of the task cannot be used: .*nosuch"),
        (McpServer(name="a", transport="stdio", command="cat"), "Expected a field `result`"),
        (McpServer(name="a", transport="stdio", command="sleep", args=("99",)), "did not respond within 2 s"),
        (McpServer(name="a", transport="http", url="http://127.0.0.1:1/"), "exit code 1.*onnect"),
        (McpServer(name="a", transport="sse", url="http://h"), "uses the deprecated transport sse"),
        (
            McpServer(name="a", transport="http", url="http://h", headers={"A-Key": "${K}"}),
            "headers with variables of this machine",
        ),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_unusable_server_is_an_error(box: Any, server: McpServer, why: str) -> None:
    with pytest.raises(AgentError, match=why):
        await opened(box, server, timeout_sec=2)


class Factory(ToolsAgentFactory):
    """Gives its agents a server, as an environment does."""

    def __call__(self, **given: Any) -> Any:
        agent = super().__call__(**given)
        agent.set_context(AgentContext(mcp_servers=(STDIO,)))
        return agent


def calling(name: str, **given: Any) -> LLMResponse:
    return LLMResponse([ToolCallData("c", name, json.dumps(given))])


@pytest.mark.asyncio(loop_scope="module")
async def test_agent_offers_and_calls_the_tools(box: Any) -> None:
    asked: list[LLMRequest] = []
    replies = [calling(ADD, by=2), calling(ADD, by="x"), calling("submit")]

    async def model(request: LLMRequest) -> LLMResponse:
        asked.append(request)
        return replies.pop(0)

    await Factory(max_output_chars=100)(container=box, llm_client=model).run("Count.")
    offered = [tool["function"]["name"] for tool in asked[0].tools or ()]
    assert offered == ["bash", "edit", "submit", ADD, "mcp__my_counter__die"]
    assert asked[1].messages[-1]["content"].startswith("2 ünits")
    assert asked[2].messages[-1]["content"] == "<error>by is no number</error>"


def test_calls_are_validated() -> None:
    assert isinstance(read_call(ToolCallData("c", ADD, "{}"), ["bash"]), UnusableCall)
    assert read_call(ToolCallData("c", ADD, '{"by": 1}'), ["bash"], [ADD]) == McpCall(ADD, {"by": 1})
    for wrong in ("{", "[]"):
        assert isinstance(read_call(ToolCallData("c", ADD, wrong), ["bash"], [ADD]), UnusableCall)


async def test_agent_with_servers_can_be_replayed() -> None:
    number = 0

    def respond(command: str) -> str:
        nonlocal number
        tools = [{"name": "add/it", "inputSchema": {"type": "object"}}]
        found = command.partition('"id": "')[2].partition('"')[0]
        result: Any = {"tools": tools, "content": [{"type": "text", "text": "1"}]}
        return json.dumps({"jsonrpc": "2.0", "id": found, "result": result}) if found else ""

    replies = [calling(ADD, by=1), calling("bash", command="ls"), calling("submit")]
    assert await check_agent(Factory(), replies=replies, container=RehearsalContainer(respond)) == 3
