"""Makes a fixture of request bodies that an agent sent: `python -m tests.soak.recorded_bodies OUT.json RUN.json…`

Each RUN.json is a list of bodies, as `tests.wire_server` keeps them. Long texts are replaced by their length and a
digest, so that the prompts of vendors are not in the repository and texts that differ still do. What all bodies share
is written once.
"""

import json
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

LONG = 120


def redacted(value: Any, most: int = LONG) -> Any:
    if isinstance(value, str) and len(value) > most and not value.startswith("data:"):
        return f"({len(value)} characters, {blake2b(value.encode(), digest_size=4).hexdigest()})"
    if isinstance(value, dict):
        return {key: redacted(item, 0 if key == "description" else LONG) for key, item in value.items()}
    return [redacted(item) for item in value] if isinstance(value, list) else value


def main(out: str, *runs: str) -> None:
    bodies = [[redacted(body) for body in json.loads(Path(run).read_text())] for run in runs]
    every = [body for run in bodies for body in run]
    common = {key: value for key, value in every[0].items() if all(body.get(key) == value for body in every)}
    rest = [[{key: value for key, value in body.items() if key not in common} for body in run] for run in bodies]
    Path(out).write_text(json.dumps({"common": common, "runs": rest}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
