"""`python -m tests.harbor_runs CONTAINER [NAME …]`: runs agents of Harbor, for their table in docs.

Each agent solves the bundled task write-greeting with a scripted policy, in a container without a network. The program
comes from a package, which is packed here if it is missing, or from npm in a temporary directory. Without names, all
agents are run. Needs Python 3.12 and the extra `harbor`. `tests.docs_reference` writes the table from the results.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ares_exp
from ares_exp.agents.installed.harbor_agents import HarborAgentFactory
from ares_exp.agents.toolbox.package import user_package
from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.commands.cli.main import run_word
from ares_exp.errors import ConfigError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedCall, ScriptedPolicy, ScriptedReply

RESULTS = Path(__file__).parent / "data" / "harbor_agents.json"
COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 'Hello, harbor!' > /app/greeting.txt"
SHELL = re.compile(r"bash|shell|terminal|exec|command|run|cmd", re.IGNORECASE)
PLAIN = re.compile(r"((execute|run)_)?(bash|shell|command|terminal)(_command)?", re.IGNORECASE)
LISTING = "/app/greeting.txt\n```\nHello, harbor!\n```\n"


@dataclass(frozen=True)
class Program:
    """The program of an agent.

    Attributes:
        specs: Packages of npm and PyPI, separated by spaces. Empty for the default package.
        options: Options of `agents pack`, separated by spaces.
        overrides: Overrides of the run.
        note: What a user has to know.
        installed: Whether npm installs the packages, because they need their scripts.
    """

    specs: str = ""
    options: str = ""
    overrides: tuple[str, ...] = ()
    note: str = ""
    installed: bool = False


SCRIPTS_OF_NPM = "Needs the scripts of npm: use `npm install` and `agent.mount`, as shown above."
PROGRAMS = {
    "aider": Program(),
    "claude-code": Program("npm:@anthropic-ai/claude-code npm:node@24", note=SCRIPTS_OF_NPM, installed=True),
    "code-puppy": Program("pip:code-puppy", "--python 3.13"),
    "codex": Program("npm:@openai/codex"),
    "copilot-cli": Program(),
    "deerflow": Program("pip:deerflow-harness", note="The package has no module `deerflow`, which the class starts."),
    "gemini-cli": Program(),
    "hermes": Program("pip:hermes-agent"),
    "kimi-cli": Program(
        "pip:kimi-cli pip:uv", "--python 3.13", note="Version 1.52.0 exits and reports that it is no longer maintained."
    ),
    "kimi-code": Program(),
    "mini-swe-agent": Program("pip:mini-swe-agent pip:litellm[mcp] pip:orjson pip:fastapi"),
    "nemo-agent": Program(
        "pip:nvidia-nat[eval,langchain]",
        note="Its default workflow is one chat completion without tools. "
        "Set `config_file` in `agent.kwargs` for another one.",
    ),
    "openclaw": Program("npm:openclaw", "--node 24", note="Its setup needs the scripts of npm and a writable package."),
    "opencode": Program(
        "npm:opencode-ai npm:node@24",
        overrides=("agent.model_name=ares/policy",),
        note=f"Needs a provider other than `openai`: `agent.model_name=ares/policy`. {SCRIPTS_OF_NPM}",
        installed=True,
    ),
    "openhands": Program("pip:openhands-ai", note="Version 1.11.0 has no module `openhands.core.main` for the class."),
    "openhands-sdk": Program("pip:openhands-sdk pip:openhands-tools pip:fastapi"),
    "pi": Program(note="Version 0.74.2 does not replace the variable in the `apiKey` that the class writes (401)."),
    "qwen-coder": Program("npm:@qwen-code/qwen-code"),
    "vibe": Program("pip:mistral-vibe"),
}
OF_VENDORS = ("antigravity-cli", "fx", "fx-dev", "grok-build", "mimo", "muse-code")
NO_PROGRAM = {
    **dict.fromkeys(OF_VENDORS, "Installed by a script of its vendor."),
    **dict.fromkeys(("computer-1", "dspy-rlm"), "Calls its LLM from Harbor's process, not from the container."),
    "antigravity-sdk": "Installed by uv from Harbor's own lock file.",
    "goose": "Installed by a script that downloads a release of GitHub.",
    "langgraph": "Needs a project of the user (`langgraph.json`).",
    "mcode": "npm has no package `@minimax-ai/code`.",
    "opencode-v2": "npm has no package `@opencode/cli`.",
    "strands": "Needs a factory of the user (`agent.kwargs`).",
    "swe-agent": "Installed from a git repository. PyPI has no package `togetherunidiff`, which it needs.",
    "terminus-2": "Calls its LLM from Harbor's process. Use `agent=terminal`, which works the same way.",
    "trae-agent": "Installed from a git repository. PyPI has no package `trae-agent`.",
}
"""Agents with an option for the URL of their LLM that have no program here, with the reason."""


class GreetingPolicy(ScriptedPolicy):
    """Solves write-greeting with the shell tool of any agent, and then ends the conversation."""

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        return respond


async def respond(request: LLMRequest) -> LLMResponse:
    said = json.dumps([message for message in request.messages if message["role"] == "assistant"])
    tools = [dict(tool.get("function") or tool) for tool in request.tools or ()]
    shells = [tool for tool in tools if SHELL.search(tool["name"])]
    if "Hello, harbor!" in said or not shells:
        text = LISTING if not tools and "Hello, harbor!" not in said else "All done."
        return LLMResponse.from_text(text, model="scripted", finish_reason="stop")
    tool = min(shells, key=lambda one: not PLAIN.fullmatch(one["name"]))
    call = ScriptedCall(tool["name"], arguments(tool.get("parameters") or tool.get("input_schema") or {}))
    return LLMResponse(ScriptedReply([call]).pieces(request), model="scripted", finish_reason="tool_calls")


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    [command, *_] = [name for name in properties if re.search(r"command|cmd|script|keystrokes", name)] or ["command"]
    values = {"boolean": False, "integer": 30, "number": 30, "array": []}
    given = {name: values.get(properties[name].get("type"), "writes") for name in schema.get("required", ())}
    is_list = properties.get(command, {}).get("type") == "array"
    return {**given, command: ["bash", "-c", COMMAND] if is_list else COMMAND}


def run(name: str, folder: str, container: str) -> dict[str, Any]:
    """Runs one agent with temporary files in `folder`, and returns its entry."""
    try:
        HarborAgentFactory(name=name)
    except ConfigError as error:
        return {"reason": str(error).removesuffix(" Use another agent.").partition(" Supported")[0]}
    if name not in PROGRAMS:
        return {"reason": NO_PROGRAM[name]}
    program = PROGRAMS[name]
    words = ["env=harbor", "env.tasks=[write-greeting]", "agent=harbor", f"agent.name={name}", *program.overrides]
    words += [f"container={container}", "policy=greeting", "tracker=none", "collector=json"]
    if program.installed:
        specs = [spec.removeprefix("npm:") for spec in program.specs.split()]
        subprocess.run(["npm", "install", "--global", "--prefix", f"{folder}/mount", *specs], check=True)
        words.append(f"agent.mount={folder}/mount")
    elif program.specs:
        first, *others = program.specs.split()
        added = [word for spec in others for word in ("--add", spec)]
        package = f"harbor-{name}"
        if AgentStore().find(user_package(package).builds[0]) is None:
            run_word(["agents", "pack", first, *added, *program.options.split(), "--name", package], program="ares-exp")
        words.append(f"agent.package={package}")
    policy = Path(folder, "policy", "greeting.yaml")
    policy.parent.mkdir()
    policy.write_text("_target_: tests.harbor_runs.GreetingPolicy\nreplies: []\n")
    [row] = ares_exp.run(words, config_dirs=[folder], quiet=True).rows
    entry = {"date": date.today().isoformat(), "harbor": version("harbor"), "reward": row.reward}
    entry |= {"requests": row.agent.requests, "version": row.agent.version, "containers": [container]}
    entry["note"] = program.note
    return entry | ({"error": f"{row.error.type}: {row.error.message}"} if row.error else {})


def main() -> None:
    """The command line."""
    from harbor.agents.factory import AgentFactory

    container, *names = sys.argv[1:]
    for name in names or AgentFactory.registered_names():
        with tempfile.TemporaryDirectory(prefix="harbor-") as folder:
            found = run(name, folder, container)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known = results.get(name, {})
        if found.get("reward") == known.get("reward") == 1.0:
            found["containers"] = sorted({container, *known["containers"]})
        results[name] = found
        print(name, json.dumps(found)[:1500], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
