"""An agent of the tests: runs what its LLM says as shell commands. The standard library alone, any Python 3.

`DONE` ends it, `EXIT 3` ends it with that code, `PARTS one|two` has each part worked on in a conversation of its
own, side by side, and `TITLE text` has a title made of the text by a call beside the work, which offers no tools.
With the argument `--text`, no call offers tools, and the first message is different in each run.
"""

import json
import os
import subprocess
import sys
import threading
import urllib.request

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
OFFERED = {} if "--text" in sys.argv else {"tools": [TOOL]}


def ask(messages, **more):
    body = {"model": os.environ["ARES_MODEL"], "messages": messages, **more}
    request = urllib.request.Request(
        os.environ["ARES_LLM_URL"] + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["ARES_LLM_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


def work(task, results, number):
    messages = [{"role": "user", "content": task}]
    while True:
        reply = ask(messages, **OFFERED)
        print(reply, flush=True)
        if reply.startswith("EXIT"):
            sys.exit(int(reply.split()[1]))
        if reply.startswith("DONE"):
            results[number] = reply
            return
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": act(reply)}]


def act(reply):
    if reply.startswith("TITLE "):
        return "title: " + ask([{"role": "user", "content": "A title for: " + reply[len("TITLE ") :]}])
    if not reply.startswith("PARTS "):
        done = subprocess.run(reply, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return f"exit code {done.returncode}\n{done.stdout}"
    parts = reply[len("PARTS ") :].split("|")
    results = [None] * len(parts)
    threads = [threading.Thread(target=work, args=(part, results, number)) for number, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(results)


work(sys.stdin.read() + (os.urandom(9).hex() if "--text" in sys.argv else ""), [None], 0)
