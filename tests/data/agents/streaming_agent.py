"""An agent of the tests: runs the reply to one streamed request as a command. The standard library alone, any Python 3.

`WIRE` names the API that it speaks, `SAMPLING` has the sampling parameters of its request as JSON.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

PATHS = {"chat_completions": "chat/completions", "responses": "responses", "messages": "messages"}
TEXTS = {
    "chat_completions": lambda event: event["choices"][0]["delta"].get("content") if event.get("choices") else None,
    "responses": lambda event: event["delta"] if event["type"] == "response.output_text.delta" else None,
    "messages": lambda event: event["delta"].get("text") if event["type"] == "content_block_delta" else None,
}

wire, key = os.environ["WIRE"], os.environ["ARES_LLM_KEY"]
task = sys.stdin.read()
body = {"model": "policy", "stream": True, **json.loads(os.environ["SAMPLING"])}
body["input" if wire == "responses" else "messages"] = [{"role": "user", "content": task}]
if wire == "messages":
    body["max_tokens"] = 4096
request = urllib.request.Request(
    os.environ["ARES_LLM_URL"] + "/v1/" + PATHS[wire],
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + key, "x-api-key": key},
)
reply = ""
for line in urllib.request.urlopen(request).read().decode().splitlines():
    if line.startswith("data: ") and line != "data: [DONE]":
        reply += TEXTS[wire](json.loads(line[6:])) or ""
subprocess.run(re.search("```bash\n(.*?)\n```", reply, re.S).group(1), shell=True, check=True)
