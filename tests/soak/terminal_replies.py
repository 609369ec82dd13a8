"""Random replies, read by the terminal agent and by Harbor's terminus-2: the same commands, errors and warnings.

`python -m tests.soak.terminal_replies [COUNT]`, with a Python that has Harbor.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from ares_exp.agents.terminal_reply import read_reply

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


def main(count: int) -> int:
    from harbor.agents.terminus_2.terminus_json_plain_parser import TerminusJSONPlainParser

    parser, rng, different = TerminusJSONPlainParser(), random.Random(1), 0
    for _ in range(count):
        text = a_reply(rng)
        theirs, ours = parser.parse_response(text), read_reply(text)
        warnings = "\n".join(f"- {warning}" for warning in ours.warnings)
        here = [(keys.text, keys.seconds) for keys in ours.commands], ours.is_complete, ours.error, warnings
        commands = [(command.keystrokes, command.duration) for command in theirs.commands]
        there = commands, bool(theirs.is_task_complete), theirs.error, theirs.warning
        if here != there and "Unknown fields" not in warnings:  # Harbor names these in an order of chance
            different += 1
            print(f"{text!r}\n  here:  {here}\n  there: {there}")
    print(f"{count} replies, {different} read differently")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000))
