"""A chat-completions endpoint whose responses depend only on the request; it counts requests by episode and turn.

With `policy.seed=episode` the seed of a request identifies the episode, and the responses in it identify the turn
of the stage that the instruction names.
Each command depends on the earlier output: an episode that continues in another environment sends other requests from
there on, and ends differently.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from typing import Any, NamedTuple

from aiohttp import web

from tests.loopback_endpoint import LoopbackEndpoint, Received, completion

SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"

STAGE = "(stage {})"
"""What the instruction of a stage says."""

KEPT_SEC = 60.0
"""How long a response is kept back at most."""

APPEND = 'echo "$said" >> /work/state; cat /work/state; ls -A /work'
"""What the agent does at each turn."""


class Turn(NamedTuple):
    """One request of one episode: its seed, how many answers it had before in its stage, and which that is."""

    seed: int
    number: int
    stage: int = 0


class CountingEndpoint(LoopbackEndpoint):
    """The endpoint of one run.

    Attributes:
        asked: How often each turn was asked for.
        turns: How many turns an episode has, at least, and at most.
        answering: While it is not set, responses are kept back.
        first_takes_sec: How long the first response of each episode takes; `None`: as long as any other.
    """

    def __init__(self, *, turns: tuple[int, int] = (3, 6), latency_sec: float = 0.03, command: str = APPEND) -> None:
        super().__init__(otherwise=self._respond)
        self._command = command
        self.asked: Counter[Turn] = Counter()
        self.turns = turns
        self.first_takes_sec: float | None = None
        self.answering = threading.Event()
        self.answering.set()
        self._latency_sec = latency_sec
        self._at: tuple[int, threading.Event] = (-1, threading.Event())

    def when(self, count: int) -> threading.Event:
        self._at = (count, threading.Event())
        if self.asked.total() >= count:
            self._at[1].set()
        return self._at[1]

    def tokens(self) -> tuple[int, int]:
        """Prompt and generated tokens of all turns that were asked for, each of them once."""
        used = [_usage(turn) for turn in self.asked]
        return sum(one["prompt_tokens"] for one in used), sum(one["completion_tokens"] for one in used)

    async def _respond(self, _: web.Request, received: Received) -> web.StreamResponse:
        body = received.body
        turn = Turn(body["seed"], self._number(body["messages"]), int(STAGE.format(1) in str(body["messages"])))
        self.asked[turn] += 1
        if self.asked.total() >= self._at[0]:
            self._at[1].set()
        takes_sec = self._latency_sec * (0.5 + turn.seed % 100 / 100)
        if self.first_takes_sec is not None and turn == Turn(turn.seed, 0, 0):
            takes_sec = self.first_takes_sec
        await asyncio.sleep(takes_sec)
        if not self.answering.is_set():
            await asyncio.to_thread(self.answering.wait, KEPT_SEC)
        shown = hashlib.sha256(self._shown(body["messages"][-1]).encode()).hexdigest()[:8]
        answered = self._completion(turn, shown, body)
        return web.json_response({**answered, "usage": _usage(turn)})

    def _number(self, messages: list[dict[str, Any]]) -> int:
        return sum(message["role"] == "assistant" for message in messages)

    def _shown(self, message: dict[str, Any]) -> str:
        return str(message["content"])

    def _completion(self, turn: Turn, shown: str, body: dict[str, Any]) -> dict[str, Any]:
        command = self._command_of(turn, shown)
        return completion(SUBMIT if command is None else f"```bash\n{command}\n```", model=body["model"])

    def _command_of(self, turn: Turn, shown: str) -> str | None:
        """What the agent does at a turn; `None` at its last one."""
        least, most = self.turns
        if turn.number == least + turn.seed % (most - least + 1) - 1:
            return None
        return f"mkdir -p /work; said='{turn.seed} {turn.stage} {turn.number} {shown}'; {self._command}"


def _usage(turn: Turn) -> dict[str, Any]:
    prompt, generated = 100 + 10 * turn.number + turn.stage, 5 + turn.seed % 7 + turn.number
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
