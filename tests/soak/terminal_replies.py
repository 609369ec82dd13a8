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
from ares_exp.agents.terminal_xml_reply import read_xml_reply
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


def an_xml_reply(rng: random.Random) -> str:
    durations = [
        ' duration="0.1"',
        " duration='5'",
        " duration=3",
        ' duration="x"',
        "",
        ' wait="1"',
        ' duration="1" x=y',
    ]
    keys = ["ls\n", "C-c", "", "a < b && c\n", "echo &lt;&amp;\n", "a\\r\\n"]
    typed = [
        f"<keystrokes{rng.choice(durations)}>{rng.choice(keys)}</keystrokes>{rng.choice(['', chr(10)])}"
        for _ in range(rng.randrange(4))
    ]
    sections = [
        rng.choice(["<analysis>a <b> c</analysis>", "<analysis/>", "<analysis></analysis>", "<analysis>a</analysis>"]),
        rng.choice(["<plan>p</plan>"] * 3 + ["<plan />", "<plan>p"]),
        rng.choice([f"<commands>\n{''.join(typed)}\n</commands>"] * 5 + ["<commands/>", "<commands>", "<commands >"]),
        rng.choice(["", "<task_complete>true</task_complete>", "<task_complete> TRUE\n</task_complete>",
                    "<task_complete/>", "<task_complete>no</task_complete>"]),
    ]  # fmt: skip
    if rng.random() < 0.2:
        rng.shuffle(sections)
    if rng.random() < 0.15:
        sections.pop(rng.randrange(4))
    if rng.random() < 0.1:
        sections.insert(
            rng.randrange(4), rng.choice(["<note>n</note>", "<!-- c -->", "<analysis>b</analysis>", "<commands>"])
        )
    text = "<response>\n" + rng.choice(["", "\n", " "]).join(sections) + "\n</response>"
    place = rng.randrange(len(text))
    return rng.choice(
        [
            *[text] * 4,
            f"Hello {text}",
            f"```xml\n{text}\n```",
            text[:place],
            text * 2,
            text[:place] + rng.choice("<>/ \"'=x") + text[place:],
            text[:place] + text[place + 1 :],
            rng.choice(["", "no", "<response></response>", "<response>x", f"</response>{text}"]),
        ]
    )


def harbor_parsers(folder: Path) -> dict[str, Any]:
    """The parsers of Harbor, loaded from its files: the package itself needs another Python and much else."""
    parsers = {}
    for form in ("json", "xml"):
        path = folder / "harbor" / "agents" / "terminus_2" / f"terminus_{form}_plain_parser.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parsers[form] = getattr(module, f"Terminus{form.upper()}PlainParser")()
    return parsers


def read_there(parser: Any, text: str) -> dict[str, Any]:
    read = parser.parse_response(text)
    commands = [[command.keystrokes, command.duration] for command in read.commands]
    warnings = read.warning.removeprefix("- ").split("\n- ") if read.warning else []
    return {"commands": commands, "is_complete": bool(read.is_task_complete), "error": read.error, "warnings": warnings}


def in_order(read: dict[str, Any]) -> dict[str, Any]:
    """Sorts those warnings that Harbor gives in an order of chance."""
    by_chance = [warning for warning in read["warnings"] if warning.startswith(("Unknown tag", "Missing <"))]
    return {**read, "warnings": sorted(by_chance) + [one for one in read["warnings"] if one not in by_chance]}


def record(parsers: dict[str, Any]) -> None:
    """Writes anew how Harbor reads the replies that the tests have."""
    data = json.loads(RECORDED.read_text())
    for form, replies in data["replies"].items():
        data["replies"][form] = [{"reply": one["reply"], **read_there(parsers[form], one["reply"])} for one in replies]
    RECORDED.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def main(folder: Path, count: int) -> int:
    parsers, rng, all_different = harbor_parsers(folder), random.Random(1), 0
    if count == 0:
        record(parsers)
    for form, make, read in (("json", a_reply, read_reply), ("xml", an_xml_reply, read_xml_reply)):
        different = left_out = 0
        for _ in range(count):
            text = make(rng)
            try:
                there = read_there(parsers[form], text)
            except IndexError:  # Harbor's: a tag of blanks alone
                left_out += 1
                continue
            here = as_recorded(read(text))
            if any("Unknown fields" in warning and "," in warning for warning in there["warnings"]):
                left_out += 1  # Harbor names these in an order of chance
            elif in_order(here) != in_order(there):
                different += 1
                print(f"{text!r}\n  here:  {here}\n  there: {there}")
        print(f"{form}: {count} replies, {different} read differently, {left_out} left out")
        all_different += different
    return int(all_different > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50_000))
