import itertools
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ares_exp.commands.cli.run_command import run_command
from ares_exp.commands.view import COOKIE, Server, Shelf
from ares_exp.errors import ConfigError
from ares_exp.trajectories.files.episode_file import dump_episode
from tests.unit.commands.recorded import row, run_of
from tests.unit.commands.served import served
from tests.unit.trajectories.chats import chat

ROWS = [row("a", 0, 1.0), row("b", 0, None)]


class Visitor:
    def __init__(self, session: aiohttp.ClientSession, first: str) -> None:
        self._session = session
        self.first = first
        self.root = first.partition("/?")[0]
        self.port = self.root.rpartition(":")[2]
        self.cookie = {COOKIE.format(self.port): first.partition("token=")[2]}

    async def ask(self, path: str, *, method: str = "GET", cookie: bool = True, **headers: str) -> tuple[int, str, Any]:
        own = "; ".join(f"{name}={value}" for name, value in self.cookie.items()) if cookie else ""
        sent = {name.replace("_", "-"): value for name, value in headers.items()} | ({"Cookie": own} if own else {})
        address = path if path.startswith("http") else self.root + path
        async with self._session.request(method, address, headers=sent, allow_redirects=False) as response:
            return response.status, await response.text(), response.headers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_of(tmp_path / "runs" / "first", ROWS)
    run_of(tmp_path / "runs" / "deeper" / "second", ROWS[:1])
    run_of(tmp_path / "outside", ROWS)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "outside")
    return tmp_path / "runs"


@pytest.fixture
async def visitor(folder: Path) -> AsyncIterator[Visitor]:
    with served(folder) as first:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            yield Visitor(session, first)


async def test_first_address_sets_cookie_and_drops_token(visitor: Visitor) -> None:
    status, _, headers = await visitor.ask(visitor.first, cookie=False)
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    status, page, headers = await visitor.ask("/")
    assert status == 200
    assert visitor.first.partition("token=")[2] not in page
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


async def test_runs_and_their_episodes_are_served(visitor: Visitor) -> None:
    listed = json.loads((await visitor.ask("/api/runs"))[1])["runs"]
    assert [one["key"] for one in listed] == ["deeper/second", "first", "linked"]
    assert listed[1]["summary"]["mean_reward"] == 1.0
    assert listed[1]["summary"]["facts"] == {"attempts": "1"}
    status, text, headers = await visitor.ask("/api/run?run=first")
    assert status == 200
    assert [one["episode_id"] for one in json.loads(text)["episodes"]] == ["a-0", "b-0"]
    again = await visitor.ask("/api/run?run=first", If_None_Match=headers["ETag"])
    assert (again[0], again[1]) == (304, "")
    assert len(json.loads((await visitor.ask("/api/episode?run=first&id=a-0"))[1])["steps"]) == 4


REFUSED: list[tuple[int, dict[str, Any]]] = [
    (401, {"cookie": False}),
    (401, {"cookie": False, "Cookie": "ares_exp_view_1=x"}),
    (421, {"Host": "evil.example"}),
    (421, {"Host": "127.0.0.1"}),
    (403, {"Origin": "http://evil.example"}),
    (403, {"Origin": "null"}),
    (403, {"Sec_Fetch_Site": "cross-site"}),
    (403, {"Sec_Fetch_Site": "same-site"}),
    *((501, {"method": method}) for method in ("POST", "PUT", "DELETE", "HEAD", "EXPLODE")),
]


async def test_unauthorized_requests_are_refused(visitor: Visitor) -> None:
    for path, (status, how) in itertools.product(("/", "/api/runs", "/api/run?run=first"), REFUSED):
        found, text, headers = await visitor.ask(path, **how)
        assert (found, "a-0" in text) == (status, False), (path, how)
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["Content-Type"].startswith("text/plain")


async def test_localhost_and_same_origin_are_accepted(visitor: Visitor) -> None:
    host = f"localhost:{visitor.port}"
    assert (await visitor.ask("/api/runs", Host=host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin"))[0] == 200


UNKNOWN = (
    *(f"/api/run?run={name}" for name in ("../outside", "/etc", "", "first/trajectories", "deeper/../first")),
    *(f"/api/episode?run=first&id={name}" for name in ("../../outside/trajectories/a-0", "", "nobody")),
    *("/first/trajectories/a-0.json", "/../outside/config.yaml", "/api/file?path=/etc/passwd"),
)


async def test_unknown_paths_are_not_found(visitor: Visitor) -> None:
    for path in UNKNOWN:
        status, text, _ = await visitor.ask(path)
        assert (status, "Please do" in text) == (404, False), path


async def test_pipes_and_broken_records_are_reported(visitor: Visitor, folder: Path) -> None:
    os.mkfifo(folder / "first" / "trajectories" / "b-1.json")
    (folder / "first" / "trajectories" / "a-0.json").write_text("{")
    run = json.loads((await visitor.ask("/api/run?run=first"))[1])
    assert len(run["problems"]) == 1
    (folder / "first" / "episodes.jsonl").write_text("no row\n")
    status, text, _ = await visitor.ask("/api/run?run=first")
    assert status == 422
    assert "episodes.jsonl, line 1" in text
    listed = json.loads((await visitor.ask("/api/runs"))[1])["runs"]
    assert "unreadable" in listed[1]["summary"]["state"]


async def test_new_steps_appear_in_the_next_response(visitor: Visitor, folder: Path) -> None:
    lines = [*dump_episode(chat("c-0", "c", length=6))]
    partial = folder / "first" / "trajectories" / "c-0.json"
    partial.write_text("".join(lines[:2]))
    path, tags = "/api/episode?run=first&id=c-0", set()
    for number in range(2, 6):
        status, text, headers = await visitor.ask(path)
        assert (status, len(json.loads(text)["steps"])) == (200, number - 1)
        tags.add(headers["ETag"])
        with partial.open("a") as file:
            file.write(lines[number])
    with partial.open("a") as file:
        file.writelines(lines[6:])
    assert len(tags) == 4
    rows = (folder / "first" / "episodes.jsonl").read_text() + json.dumps(row("c", 0, 1.0).to_dict()) + "\n"
    (folder / "first" / "episodes.jsonl").write_text(rows)
    episodes = json.loads((await visitor.ask("/api/run?run=first"))[1])["episodes"]
    assert [one["outcome"] for one in episodes] == ["completed", "agent_error", "completed"]


async def test_new_run_is_listed(visitor: Visitor, folder: Path) -> None:
    await visitor.ask("/api/runs")
    run_of(folder / "third", ROWS)
    assert (await visitor.ask("/api/run?run=third"))[0] == 200
    assert len(json.loads((await visitor.ask("/api/runs"))[1])["runs"]) == 4


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(*words: str) -> int:
        return run_command("view", words, "ares-exp view")

    assert main(str(tmp_path / "nothing")) == 2
    assert "Expected a run directory or a folder of runs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(str(tmp_path), "--port", "70000")
    assert "expected a port" in capsys.readouterr().err


async def test_occupied_port_is_an_error(visitor: Visitor, folder: Path) -> None:
    with pytest.raises(ConfigError, match="another program listens there"):
        Server(Shelf(folder), port=int(visitor.port))
