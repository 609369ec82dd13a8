"""Random replies, read by the terminal agent and by Harbor's terminus-2: the same commands, errors and warnings.

`python -m tests.soak.terminal_replies FOLDER [COUNT]`; the folder is Harbor's wheel, unpacked (`pip download --no-deps
--python-version 3.12 --only-binary=:all: harbor`, `unzip`). A count of 0 writes anew how Harbor reads the replies of
`tests/data/terminus_replies.json`.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

from ares_exp.agents.terminal_reply import read_reply
from tests.unit.agents.test_terminal_reply import RECORDED, as_recorded

CHARACTERS = '{}"\\,:[] x'


def a_reply(rng: random.Random) -> str:
    commands = [
        {"keystrokes": rng.choice(["ls\n", "C-c", "", "x"]), "duration": rng.choice([0.1, 5, "x", True, None, -1])}
        for _ in range(rng.randrange(4))
    ]
    for command in commands:
        if rng.random() < 0.2:
            command.pop("duration")
        if rng.random() < 0.1:
            command["extra"] = 1
    fields: dict[str, Any] = {"analysis": 'a {x} "q" \\', "plan": "p", "commands": commands}
    if rng.random() < 0.5:
        fields["task_complete"] = rng.choice([True, False, "true", "no", 1, None, []])
    if rng.random() < 0.05:
        fields["commands"] = rng.choice(["x", {}, ["x"], [{}], [{"keystrokes": 1}], None])
    items = list(fields.items())
    if rng.random() < 0.2:
        rng.shuffle(items)
    if rng.random() < 0.15:
        items.pop(rng.randrange(len(items)))
    return damaged(json.dumps(dict(items), indent=rng.choice([None, 2])), rng)


def damaged(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    return rng.choice(
        [
            *[text] * 3,
            f"Hello {text}",
            text + rng.choice([" bye", "}", "{}", "\n```"]),
            f"```json\n{text}\n```",
            text[:place],
            text[:place] + rng.choice(CHARACTERS) + text[place + 1 :],
            text[:place] + rng.choice(CHARACTERS) + text[place:],
            rng.choice(["", "no", "{}", "[]", '{"a":{"b":{}}}', f'He said "{{ x {text}', f"}} {text}", text * 2]),
        ]
    )


def harbor_parser(folder: Path) -> Any:
    """The parser of Harbor, loaded from its file: the package itself needs another Python and much else."""
    path = folder / "harbor" / "agents" / "terminus_2" / "terminus_json_plain_parser.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TerminusJSONPlainParser()


def read_there(parser: Any, text: str) -> dict[str, Any]:
    read = parser.parse_response(text)
    commands = [[command.keystrokes, command.duration] for command in read.commands]
    warnings = read.warning.removeprefix("- ").split("\n- ") if read.warning else []
    return {"commands": commands, "is_complete": bool(read.is_task_complete), "error": read.error, "warnings": warnings}


def record(parser: Any) -> None:
    """Writes anew how Harbor reads the replies that the tests have."""
    data = json.loads(RECORDED.read_text())
    data["replies"] = [{"reply": one["reply"], **read_there(parser, one["reply"])} for one in data["replies"]]
    RECORDED.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def main(folder: Path, count: int) -> int:
    parser, rng = harbor_parser(folder), random.Random(1)
    if count == 0:
        record(parser)
    different = left_out = 0
    for _ in range(count):
        text = a_reply(rng)
        there, here = read_there(parser, text), as_recorded(read_reply(text))
        if any("Unknown fields" in warning and "," in warning for warning in there["warnings"]):
            left_out += 1  # Harbor names these in an order of chance
        elif here != there:
            different += 1
            print(f"{text!r}\n  here:  {here}\n  there: {there}")
    print(f"{count} replies, {different} read differently, {left_out} left out")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50_000))
