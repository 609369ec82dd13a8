"""The time of each installed agent in an episode beside the same program by hand in the same Docker image.

Run by hand, with an engine and the packages of the agents: `python -m tests.benchmarks.bench_agents [AGENT …]`. Prints
the medians of pairs: seconds of the phases `agent` and `policy` of an episode, and seconds of `docker exec` of the same
command against a plain loopback server with the same scripted replies.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ares_exp.agents.installed.installed_agent import (
    INSTRUCTION_FILE,
    MCP_FILE,
    NO_SKILLS,
    InstalledAgentFactory,
    Launch,
    mcp_json,
)
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import ExecResult
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from tests.installed_agents import OPTIONS, SCRIPTS, execute
from tests.wire_server import WireServer

PAIRS = 5
TASK = Path(__file__).parents[2] / "ares_exp/tasks/samples/write-greeting"


class ScriptedServer(WireServer):
    """Responds with the replies of a script in order."""

    def __init__(self, agent: str) -> None:
        super().__init__()
        self._replies = [_response(reply) for reply in SCRIPTS[agent]]

    def _whole(self, *arguments: Any) -> Any:
        self.response = self._replies.pop(0)
        return super()._whole(*arguments)

    async def _stream(self, *arguments: Any) -> Any:
        self.response = self._replies.pop(0)
        return await super()._stream(*arguments)


def _response(reply: Any) -> LLMResponse:
    if isinstance(reply, str):
        return LLMResponse.from_text(reply, model="m", finish_reason="stop")
    [call] = reply["tool_calls"]
    pieces = [TextData(reply["text"]), ToolCallData("call_1", call["name"], json.dumps(call["arguments"]))]
    return LLMResponse(pieces, model="m", finish_reason="tool_calls")


class PlainContainer:
    """A container of the engine's own client. It shares the host's network, so that it reaches the server."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def exec(self, command: str, **_: object) -> ExecResult:
        done = self.run(command)
        return ExecResult(output=done.stdout + done.stderr, exit_code=done.returncode, duration_sec=0.0)

    def run(
        self, command: str, text: str = "", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = ["docker", "exec", "-i"]
        for name in env or {}:
            words += ["-e", name]
        words += [self.name, "bash", "-c", command]
        more = {**os.environ, **(env or {})}
        return subprocess.run(words, input=text, env=more, capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def plain_container(image: str, factory: InstalledAgentFactory) -> Iterator[PlainContainer]:
    words = ["docker", "run", "-d", "--rm", "--init", "--network", "host"]
    for mount in factory.mounts:
        words += ["-v", f"{mount.source}:{mount.target}:ro"]
    words += [image, "sleep", "infinity"]
    name = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    try:
        yield PlainContainer(name)
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=True)


def by_hand(agent: str, image: str, factory: InstalledAgentFactory) -> float:
    with ScriptedServer(agent) as server, plain_container(image, factory) as container:
        program = asyncio.run(factory.find_program(container))  # type: ignore[arg-type]
        launch = Launch(server.url, "key", "model", INSTRUCTION_FILE, program=program)
        launched = factory.command(launch)
        files = {path: file.text for path, file in launched.files.items()}
        instruction = (TASK / "instruction.md").read_text()
        for path, text in {**files, INSTRUCTION_FILE: instruction, MCP_FILE: mcp_json(())}.items():
            place = path.replace("~", "/root", 1)
            made = container.run(f"mkdir -p {Path(place).parent} {NO_SKILLS} && cat >{place}", text)
            assert made.returncode == 0, made.stderr
        start = time.perf_counter()
        done = container.run(launched.command, instruction, {**launch.variables, **launched.env})
        seconds = time.perf_counter() - start
        assert container.run("grep Hello /app/greeting.txt").returncode == 0, done.stdout + done.stderr
        return seconds


def in_episode(agent: str, folder: str) -> float:
    results = execute(folder, agent, "docker")
    [row] = results.rows
    assert row.reward == 1.0, row
    return row.phase_sec["agent"] + row.phase_sec["policy"]


def main(agents: list[str]) -> None:
    os.chdir(tempfile.mkdtemp(prefix="bench-agents-"))
    print("| agent | by hand | episode | ratio |\n|---|---|---|---|")
    for agent in agents:
        words = [f"agent={agent}", "policy=scripted", "policy.replies=[]", *OPTIONS.get(agent, ())]
        factory = instantiate_group(compose_config(words), "agent")
        asyncio.run(factory.preflight())
        in_episode(agent, f"{agent}_warm")  # builds the image
        listed = subprocess.run(["docker", "images", "-q", "ares-exp/write-greeting"], capture_output=True, text=True)
        image = listed.stdout.split()[0]  # the newest
        by_hand(agent, image, factory)
        pairs = [(by_hand(agent, image, factory), in_episode(agent, f"{agent}_{number}")) for number in range(PAIRS)]
        hand, episode = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(f"| {agent} | {hand:.2f} s | {episode:.2f} s | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(SCRIPTS))
