"""An agent of the tests: sends the recorded requests of the Messages API in its argument, one after the other."""

import json
import os
import sys
import urllib.request
from pathlib import Path

recorded = json.loads(Path(sys.argv[1]).read_text())
for body in recorded["runs"][0]:
    request = urllib.request.Request(
        os.environ["ARES_LLM_URL"] + "/v1/messages",
        json.dumps({**recorded["common"], **body}).encode(),
        {"Content-Type": "application/json", "x-api-key": os.environ["ARES_LLM_KEY"]},
    )
    urllib.request.urlopen(request).read()
