"""A server with two scripted models, for the tutorial: `python -m ares_exp.testing.demo_server`.

The server implements OpenAI's Chat Completions API. It needs no API key and no network. The models are scripts that can
solve only one task: finding the busiest hour in a log. For the same instruction, `demo-small` makes a realistic mistake
in every second attempt. `demo-large` makes no mistakes. Both write the hour with two digits only if the instruction
asks for two digits.
"""

from __future__ import annotations

import argparse
import socket
from collections import Counter
from typing import Any

from aiohttp import web

MODELS = ("demo-small", "demo-large")
LOOK = "I look at the log first.\n\n```bash\nhead -n 4 /app/access.log; wc -l /app/access.log\n```"
COUNT = (
    "I count the requests per hour and keep the hour with the most.\n\n```bash\ncd /app\n"
    "cut -c 12-13 access.log |{sort} uniq -c | sort -n | tail -n 1 | awk '{{print $2{suffix}}}' > hour.txt\n"
    "cat hour.txt\n```"
)
SUBMIT = "\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
DONE = f"The file is written.{SUBMIT}"
UNKNOWN = f"I follow a script for the tutorial's task, and this is another task. I submit without a solution.{SUBMIT}"


class DemoModels:
    """The models, and the handlers of requests to the server."""

    def __init__(self) -> None:
        self._attempts: Counter[tuple[str, str]] = Counter()

    async def models(self, request: web.Request) -> web.Response:
        """Responds to a request for the list of models."""
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})

    async def chat(self, request: web.Request) -> web.Response:
        """Responds to a chat request with the next scripted reply in its conversation."""
        body = await request.json()
        model, messages = body.get("model"), body.get("messages")
        if model not in MODELS or not isinstance(messages, list):
            expected = f"Expected messages and one of the models {', '.join(MODELS)}, got model {model!r:.100}."
            return web.json_response({"error": {"message": expected}}, status=404)
        reply = self._reply(model, messages)
        prompt, completion = len(str(messages)) // 4, len(reply) // 4  # a token has about four characters
        choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        response = {"id": "demo", "object": "chat.completion", "created": 0, "model": model}
        return web.json_response({**response, "choices": [choice], "usage": usage})

    def _reply(self, model: str, messages: list[dict[str, Any]]) -> str:
        turn = sum(message.get("role") == "assistant" for message in messages)
        conversation = str(messages)
        if "/app/hour.txt" not in conversation:
            return UNKNOWN
        if turn > 1:
            return DONE
        if turn == 0:
            return LOOK
        self._attempts[model, conversation] += 1
        is_careless = model == "demo-small" and self._attempts[model, conversation] % 2 == 0
        suffix = "" if "two digits" in conversation else ' ":00"'
        return COUNT.format(sort="" if is_careless else " sort |", suffix=suffix)


def main() -> None:
    """Serves the models until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m ares_exp.testing.demo_server", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1; 0 for a free port (default: 8000)")
    port = parser.parse_args().port
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        parser.error(f"Cannot listen on port {port} ({error}). Use another port with --port.")
    handlers, app = DemoModels(), web.Application()
    app.router.add_get("/v1/models", handlers.models)
    app.router.add_post("/v1/chat/completions", handlers.chat)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    print(f"Serving {' and '.join(MODELS)} at {url}. Stop with Ctrl-C.", flush=True)  # noqa: T201
    web.run_app(app, sock=listener, print=None)


if __name__ == "__main__":
    main()
