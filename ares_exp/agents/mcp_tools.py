"""Tools of a task's MCP servers (https://modelcontextprotocol.io), which the tools agent offers to its LLM.

The agent sends each request to a server with an ordinary command in the container. The command is recorded in the
agent's journal, has a time limit, and runs with the rights of the agent's user. A `stdio` server runs in the container,
reads from a FIFO and writes to a file. For a `streamable-http` server, the command uses `curl`, or `python3` if `curl`
is missing. A `stdio` server in a restored container is started again, without the data that was in its memory.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.tool_calls import McpCall, ToolError
from ares_exp.errors import AgentError, WireFormatError
from ares_exp.llms.chat_messages import function_tool
from ares_exp.llms.wire import EventReader, list_of, optional, required, shorten, typed
from ares_exp.tasks.task_toml import McpServer

PROTOCOL_VERSION = "2025-06-18"
MAX_TOOLS = 128
MAX_PAGES = 20
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 4000
MAX_SCHEMA_CHARS = 20_000
MAX_RESPONSE_BYTES = 4 * 2**20

_FOLDER = "/tmp/.ares_exp_mcp"
_GONE, _NO_CLIENT = 75, 77
_SLEEP = "{ sleep 0.02 2>/dev/null || sleep 1; }"
_OTHER_CHARS = re.compile(r"[^A-Za-z0-9_-]")

logger = logging.getLogger(__name__)


class ServerGoneError(ToolError):
    """A server is not running, or reports that its session has ended. The agent can start it again."""


@dataclass
class _Server:
    """An MCP server: its description in the task, its folder, its HTTP session id, and its number of requests."""

    about: McpServer
    folder: str
    session: str | None = None
    asked: int = 0


class McpTools:
    """The tools of a task's MCP servers. First call `open`, which fills both attributes.

    Attributes:
        tools: Server of each tool, and the tool's name there, by the name that is offered to the LLM.
        definitions: Definitions of the tools for the LLM, in the chat-completions format.
    """

    def __init__(self, container: AgentContainer, *, timeout_sec: float) -> None:
        """Starts without servers. `timeout_sec` is the time limit of each request."""
        self._container = container
        self._timeout_sec = timeout_sec
        self.tools: dict[str, tuple[_Server, str]] = {}
        self.definitions: list[dict[str, Any]] = []

    async def open(self, servers: Sequence[McpServer]) -> None:
        """Starts the servers of a task and requests their tools.

        Raises:
            AgentError: A server does not start or does not list its tools. The message contains the reason.
        """
        for place, about in enumerate(servers):
            if about.transport == "sse":
                raise AgentError(
                    f"The MCP server {about.name!r} of the task uses the deprecated transport sse, but agent=tools "
                    "supports only streamable-http and stdio. Use another agent."
                )
            if any("${" in value for value in about.headers.values()):
                raise AgentError(
                    f"The MCP server {about.name!r} of the task has headers with variables of this machine. "
                    "agent=tools does not send their values, because its requests are recorded. Leave the task out."
                )
            try:
                server = _Server(about, f"{_FOLDER}/{place}")
                await self._start(server)
                await self._list(server)
            except (ToolError, WireFormatError) as error:
                raise AgentError(f"The MCP server {about.name!r} of the task cannot be used: {error}") from None

    async def call(self, call: McpCall) -> str:
        """Executes a call and returns the result as text. If the server is gone, restarts it and calls the tool again.

        Raises:
            ToolError: The tool failed, or the server sent no usable response.
        """
        server, name = self.tools[call.name]
        asked = {"name": name, "arguments": call.arguments}
        try:
            try:
                return _result(await self._ask(server, "tools/call", asked))
            except ServerGoneError:
                await self._start(server)
                again = _result(await self._ask(server, "tools/call", asked))
                return f"(The server was restarted, so the data in its memory is lost.)\n{again}"
        except WireFormatError as error:
            raise ToolError(f"The MCP server {server.about.name} sent an invalid response: {error}") from None

    async def _start(self, server: _Server) -> None:
        """Starts a `stdio` server, or opens a session with an HTTP server."""
        server.session = None
        if server.about.transport == "stdio":
            folder, words = server.folder, shlex.join([str(server.about.command), *server.about.args])
            # The server's stdin also holds the FIFO open for writing, so that no request ends with an end of file.
            run = f"exec {words} 0<>{folder}/in 1>>{folder}/out 2>{folder}/err"
            await self._run(
                f"if {_lives(folder)}; then kill $(cat {folder}/pid); fi; rm -rf {folder}; "
                f"mkdir -p {folder} && mkfifo {folder}/in && : >{folder}/out && : >{folder}/err || exit 1; "
                f"$(command -v setsid) sh -c {shlex.quote(run)} </dev/null >/dev/null 2>&1 & echo $! >{folder}/pid; "
                f"until {_lives(folder)}; do [ -e /proc/$!/exe ] || {_ends(folder)}; {_SLEEP}; done"
            )
        client = {"name": "ares_exp", "version": "1"}
        offered = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
        await self._ask(server, "initialize", offered)
        await self._send(server, {"jsonrpc": "2.0", "method": "notifications/initialized"}, None)

    async def _list(self, server: _Server) -> None:
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._ask(server, "tools/list", {} if cursor is None else {"cursor": cursor})
            for tool in list_of(page, "tools", Mapping) or ():
                self._add(server, tool)
            cursor = optional(page, "nextCursor", str)
            if not cursor:
                return

    def _add(self, server: _Server, tool: Mapping[str, Any]) -> None:
        name, schema = required(tool, "name", str), required(tool, "inputSchema", Mapping)
        known_as = _OTHER_CHARS.sub("_", f"mcp__{server.about.name}__{name}")[:MAX_NAME_CHARS]
        too_much = len(self.tools) >= MAX_TOOLS or len(json.dumps(schema)) > MAX_SCHEMA_CHARS
        if too_much or known_as in self.tools or schema.get("type") != "object":
            logger.warning(
                "The agent does not get the tool %.80r of the MCP server %r. Expected at most %d tools, each with a "
                "unique name and an object schema of at most %d characters.",
                *(name, server.about.name, MAX_TOOLS, MAX_SCHEMA_CHARS),
            )
            return
        self.tools[known_as] = server, name
        described = (optional(tool, "description", str) or "")[:MAX_DESCRIPTION_CHARS]
        self.definitions.append(function_tool(known_as, described, schema))

    async def _ask(self, server: _Server, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        server.asked += 1
        number = f"ares-{server.asked}"
        said = await self._send(server, {"jsonrpc": "2.0", "id": number, "method": method, "params": params}, number)
        response = next((one for one in _responses(said) if one.get("id") == number), None)
        if response is None:
            raise ToolError(f"Expected the server to respond to {method}, got {shorten(said)}")
        if isinstance(error := response.get("error"), Mapping):
            raise ToolError(f"{method} failed: {str(error.get('message'))[:1000]}")
        return required(response, "result", Mapping)  # type: ignore[no-any-return]

    async def _send(self, server: _Server, message: Mapping[str, Any], number: str | None) -> str:
        """Sends a JSON-RPC message and returns the server's output.

        For a notification, `number` is `None`, and the method does not wait for a response of a `stdio` server.
        """
        line = json.dumps(message)
        if server.about.transport == "stdio":
            return await self._run(_stdio_script(server, line, number))
        said = await self._run(_http_script(server, line, int(self._timeout_sec) + 1))
        head, _, body = said.partition("\n\n")
        status, _, session = head.partition("\n")
        server.session = session.strip() or server.session
        if status == "404" and server.session is not None:
            raise ServerGoneError("The server has ended the session.")
        if not status.startswith("2"):
            raise ToolError(f"The server responded with status {status[:20]!r}: {shorten(body)}")
        return body

    async def _run(self, script: str) -> str:
        result = await self._container.exec(
            script, timeout_sec=self._timeout_sec, max_output_bytes=MAX_RESPONSE_BYTES, shell="sh -c"
        )
        if result.timed_out:
            raise ToolError(f"The server did not respond within {self._timeout_sec:g} s.")
        if result.exit_code == _GONE:
            raise ServerGoneError(f"The server is not running. Its output: {result.output[-500:]!r}.")
        if result.exit_code == _NO_CLIENT:
            raise ToolError("The image has neither curl nor python3. A streamable-http server needs one of them.")
        if result.exit_code != 0:
            raise ToolError(f"A request to the server failed (exit code {result.exit_code}): {result.output[-500:]!r}.")
        return result.output


def _lives(folder: str) -> str:
    """Returns a shell condition that is true while the `stdio` server runs and its stdin is still the FIFO."""
    return f'[ "$(readlink /proc/$(cat {folder}/pid 2>/dev/null || echo none)/fd/0)" = {folder}/in ]'


def _ends(folder: str) -> str:
    return f"{{ tail -c 500 {folder}/err 2>/dev/null; exit {_GONE}; }}"


def _stdio_script(server: _Server, line: str, number: str | None) -> str:
    folder, gone = server.folder, f"{_lives(server.folder)} || {_ends(server.folder)}"
    send = f"{gone}; : >{folder}/out; printf '%s\\n' {shlex.quote(line)} 1<>{folder}/in"
    if number is None:
        return send
    answered = f"""grep -q '"id" *: *"{number}"' {folder}/out && [ -z "$(tail -c 1 {folder}/out)" ]"""
    wait = f"until {answered}; do {gone}; {_SLEEP}; done"
    return f"{send}; {wait}; cat {folder}/out"


def _http_script(server: _Server, line: str, seconds: int) -> str:
    """Returns a script that posts `line` to an HTTP server.

    The script prints the status, the session id (or an empty line), an empty line, and the body of the response.
    """
    headers = {
        **server.about.headers,
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": PROTOCOL_VERSION,
    }
    if server.session is not None:
        headers["Mcp-Session-Id"] = server.session
    url, head = shlex.quote(str(server.about.url)), f"{server.folder}.head"
    given = " ".join(f"-H {shlex.quote(f'{name}: {value}')}" for name, value in headers.items())
    curl = (
        f"mkdir -p {_FOLDER}; printf %s {shlex.quote(line)} | curl -sS --max-time {seconds} -D {head} "
        f"-o {head}.body {given} -H Expect: --data-binary @- {url} || exit 1; "
        f"sed -n '1s/[^ ]* \\([0-9]*\\).*/\\1/p' {head}; "
        f"tr -d '\\r' <{head} | sed -n 's/^[Mm][Cc][Pp]-[Ss]ession-[Ii][Dd]: *//p' | head -n 1; echo; cat {head}.body"
    )
    python = f"python3 -c {shlex.quote(_POST)} {url} {shlex.quote(json.dumps(headers))} {shlex.quote(line)} {seconds}"
    return (
        f"if command -v curl >/dev/null; then {curl}; elif command -v python3 >/dev/null; then {python}; "
        f"else exit {_NO_CLIENT}; fi"
    )


_POST = """
import json, sys, urllib.error, urllib.request
url, headers, line, seconds = sys.argv[1:]
request = urllib.request.Request(url, line.encode(), json.loads(headers), method="POST")
try:
    response = urllib.request.urlopen(request, timeout=float(seconds))
except urllib.error.HTTPError as error:
    response = error
except OSError as error:
    sys.exit(str(error))
print(response.status, response.headers.get("Mcp-Session-Id") or "", sep="\\n", end="\\n\\n", flush=True)
sys.stdout.buffer.write(response.read())
"""


def _responses(said: str) -> Iterator[Mapping[str, Any]]:
    """Yields the JSON-RPC messages in a server's output: server-sent events or JSON lines. Skips invalid messages."""
    stripped = said.lstrip()
    is_events = stripped.startswith(("event:", "data:", "id:", ":"))
    texts = list(EventReader().feed(said.encode() + b"\n\n")) if is_events else stripped.splitlines()
    for text in texts:
        with suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(text), dict):
                yield message


def _result(result: Mapping[str, Any]) -> str:
    """Returns the result of a tool call as text. Raises `ToolError` if the result reports that the tool failed."""
    parts = [_part(part) for part in list_of(result, "content", Mapping) or ()]
    if not parts and result.get("structuredContent") is not None:
        parts = [json.dumps(result["structuredContent"])]
    text = "\n".join(parts)
    if result.get("isError") is True:
        raise ToolError(text or "The tool failed.")
    return text


def _part(part: Mapping[str, Any]) -> str:
    kind = required(part, "type", str)
    if kind == "text":
        return str(required(part, "text", str))
    resource = typed(part.get("resource") or {}, "resource", Mapping)
    if isinstance(resource.get("text"), str):
        return str(resource["text"])
    return f"[{kind} {str(part.get('mimeType') or resource.get('uri') or part.get('uri') or '')[:200]}]"
