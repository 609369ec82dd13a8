"""Runs of the real agents that are killed at moments spread over them, and resumed until they are complete.

`python -m tests.soak.killed_agents AGENT COUNT [SEED] [BACKEND] [OVERRIDE …]` prints a line for each.
`tests.e2e.killed_run.check` checks each: no turn is requested twice except the call in progress, the reward equals the
reward of a run that was not killed, and no process or container is left.
"""

import json
import re
import sys
from typing import Any

from tests.e2e.counting_endpoint import CountingEndpoint, Turn
from tests.e2e.killed_run import PLAIN
from tests.loopback_endpoint import completion
from tests.soak.kills import main

TURNS, AIDER_TURNS = 6, 4
"""Turns of an episode. aider repeats a request at most three times."""
SHELLS = {"exec_command": "cmd", **dict.fromkeys(("Bash", "bash", "run_shell_command", "terminal"), "command")}
"""Tools for commands, with the argument that has the command."""
NOTES = {"description": "works", "summary": "works", "security_risk": "LOW"}
"""Other arguments that some of these tools have."""
_STATE = re.compile(r"\d+ \d \d+ [0-9a-f]{8}")
"""A line of the file that the commands write: what else is shown differs at every run."""
EDIT = "/work/state\n```\n<<<<<<< SEARCH\n{}=======\n{}\n>>>>>>> REPLACE\n```\n"
"""An edit in aider's format. It appends to the file, or fails if the text to replace is missing."""


class AgentsEndpoint(CountingEndpoint):
    """Calls the tool that the agent has for commands."""

    def __init__(self, turns: int = TURNS) -> None:
        super().__init__(turns=(turns, turns))

    def _shown(self, message: dict[str, Any]) -> str:
        return " ".join(_STATE.findall(str(message["content"])))

    def _completion(self, turn: Turn, shown: str, body: dict[str, Any]) -> dict[str, Any]:
        command = self._command_of(turn, shown)
        if command is None:
            return completion("All done.", model=body["model"])
        tools = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in body["tools"]}
        [name, *_] = [one for one in SHELLS if one in tools]
        arguments = {SHELLS[name]: command} | {key: note for key, note in NOTES.items() if key in tools[name]}
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = [{"id": f"call_{turn.number}", "type": "function", "function": function}]
        return completion(None, tool_calls=calls, model=body["model"])


class AiderEndpoint(AgentsEndpoint):
    """Replies with edits in aider's format. aider asks again if one of them fails."""

    def __init__(self) -> None:
        super().__init__(AIDER_TURNS)

    def _number(self, messages: list[dict[str, Any]]) -> int:
        """Leaves out the example replies, which precede the instruction."""
        [start, *_] = [place for place, one in enumerate(messages) if "(stage " in str(one["content"])]
        return super()._number(messages[start:])

    def _completion(self, turn: Turn, shown: str, body: dict[str, Any]) -> dict[str, Any]:
        edits = [EDIT.format("", f"{turn.seed} {turn.stage} {turn.number} {shown}")]
        if self._command_of(turn, shown) is not None:
            edits.append(EDIT.format("Something that is missing.\n", ""))
        return completion("\n".join(edits), model=body["model"])


if __name__ == "__main__":
    given = sys.argv[1:]
    start = int(given[2]) if len(given) > 2 else 0
    words = [f"agent={given[0]}", "attempts=1", "concurrency=1", "collector=none", *given[4:]]
    backend = given[3] if len(given) > 3 else "local"
    kind: type[CountingEndpoint] = AgentsEndpoint
    if given[0] == "aider":
        kind, words = AiderEndpoint, [*words, "+agent.env.AIDER_EDIT_FORMAT=diff"]
    raise SystemExit(main(backend, int(given[1]), start, words, endpoint_type=kind, tasks=[PLAIN]))
