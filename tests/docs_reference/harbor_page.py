"""The table in docs/compatibility.md of each agent of Harbor with the result of its last run by `tests.harbor_runs`."""

import json
import re
from typing import Any

from tests.docs_reference.markdown import plain, table
from tests.docs_reference.packages_page import PACKAGE
from tests.harbor_runs import RESULTS

PAGE = PACKAGE.parent / "docs" / "compatibility.md"
HEADING = "### Results of each agent\n"
SHOWN_CHARS = 200


def harbor_page() -> str:
    """The page: its text, which is written by hand, and a table of all agents."""
    text, heading, rest = PAGE.read_text().partition(HEADING)
    end = rest[rest.index("\n## ") :]
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    solved = sum(one.get("reward") == 1.0 for one in results.values())
    rows = [(f"`{name}`", *_cells(one)) for name, one in sorted(results.items())]
    return (
        f"{text}{heading}\n{solved} of {len(results)} agents solved the bundled task `write-greeting` with a scripted "
        "policy, in a container\nwithout a network. `python -m tests.harbor_runs` runs them again.\n\n"
        f"{table(('`agent.name=`', 'reward', 'requests', 'version', 'container', 'date', 'note'), rows)}{end}"
    )


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    note = " ".join((one.get("reason") or one.get("note") or one.get("error") or "").split())
    shown = plain(note if len(note) <= SHOWN_CHARS else f"{note[:SHOWN_CHARS]}…")
    if "reason" in one:
        return ("–",) * 5 + (shown,)
    reward = "–" if one["reward"] is None else f"{one['reward']:g}"
    version = re.sub(r" ?sha256:.*", "", one["version"] or "").removeprefix("harbor-") or "–"
    return reward, str(one["requests"]), version, ", ".join(one["containers"]), one["date"], shown
