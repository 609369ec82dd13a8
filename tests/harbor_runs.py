"""`python -m tests.harbor_runs [NAME=MOUNT …]`: runs agents of Harbor, and records the results for their table in docs.

Each agent solves the bundled task write-greeting with a scripted policy, in a container without a network. `MOUNT` is a
directory with the program of the agent in `bin/`. Needs Python 3.12 and the extra `harbor`.
"""

import json
import re
import shutil
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ares_exp
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedCall, ScriptedPolicy, ScriptedReply

RESULTS = Path(__file__).parent / "data" / "harbor_agents.json"
COMMAND = "echo 'Hello, harbor!' > /app/greeting.txt"
SHELL = re.compile(r"bash|shell|terminal|exec|command|run|cmd", re.IGNORECASE)
PLAIN = re.compile(r"((execute|run)_)?(bash|shell|command|terminal)(_command)?", re.IGNORECASE)
AIDER = "/app/greeting.txt\n```\nHello, harbor!\n```\n"


class GreetingPolicy(ScriptedPolicy):
    """Solves write-greeting with the shell tool of any agent, and then ends the conversation."""

    def __init__(self) -> None:
        super().__init__(replies=[])

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        return respond


async def respond(request: LLMRequest) -> LLMResponse:
    said = json.dumps([message for message in request.messages if message["role"] == "assistant"])
    is_done = "Hello, harbor!" in said
    tools = [dict(tool.get("function") or tool) for tool in request.tools or ()]
    shells = [tool for tool in tools if SHELL.search(tool["name"])]
    if is_done or not shells:
        return LLMResponse.from_text("All done." if is_done or tools else AIDER, model="scripted", finish_reason="stop")
    tool = min(
        shells,
        key=lambda one: (
            not re.fullmatch(r"(?i)(execute_|run_)?(bash|shell|command)(_command)?", one["name"]),
            one["name"],
        ),
    )
    call = ScriptedCall(tool["name"], arguments(tool.get("parameters") or tool.get("input_schema") or {}))
    return LLMResponse(ScriptedReply([call]).pieces(request), model="scripted", finish_reason="tool_calls")


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """The required arguments of a shell tool, and its command."""
    properties = schema.get("properties", {})
    [command, *_] = [name for name in properties if re.search(r"command|cmd|script|keystrokes", name)] or ["command"]
    values = {"boolean": False, "integer": 30, "number": 30, "array": []}
    given = {name: values.get(properties[name].get("type"), "writes") for name in schema.get("required", ())}
    is_list = properties.get(command, {}).get("type") == "array"
    return {**given, command: ["bash", "-c", COMMAND] if is_list else COMMAND}


def run(name: str, mount: str, container: str) -> dict[str, Any]:
    """Runs one agent, and returns its entry."""
    with tempfile.TemporaryDirectory(prefix="harbor-") as folder:
        policy = Path(folder, "policy", "greeting.yaml")
        policy.parent.mkdir()
        policy.write_text("_target_: tests.harbor_runs.GreetingPolicy\n")
        run_dir = Path("outputs") / f"harbor-{name}"
        shutil.rmtree(run_dir, ignore_errors=True)
        words = [
            "env=harbor",
            "env.tasks=[write-greeting]",
            "agent=harbor",
            f"agent.name={name}",
            f"agent.mount={mount}",
        ]
        words += [
            f"container={container}",
            "policy=greeting",
            "tracker=none",
            "collector=json",
            f"hydra.run.dir={run_dir}",
        ]
        [row] = ares_exp.run(words, config_dirs=[folder], quiet=True).rows
    return {
        "container": container,
        "date": date.today().isoformat(),
        "harbor": version("harbor"),
        "reward": row.reward,
        "requests": row.agent.requests,
        "version": row.agent.version,
        "error": row.error and row.error.message,
    }


def main() -> None:
    """The command line."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    container, *pairs = sys.argv[1:]
    for pair in pairs:
        name, _, mount = pair.partition("=")
        try:
            results[name] = run(name, mount, container)
        except Exception as error:
            results[name] = {"error": str(error)}
        print(name, json.dumps(results[name])[:1500], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
