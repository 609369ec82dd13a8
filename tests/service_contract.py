"""The contract of the rollout service over HTTP, for any executor: inherit `ServiceContract` and set `overrides`."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ares_exp.cancellation import finish
from ares_exp.runs.composing import compose_run, run_log
from ares_exp.training.service import served_rollouts
from ares_exp.training.service.bodies import Episode
from ares_exp.training.service.serving import ServeOptions, Service
from tests.byte_tokenizer import use_byte_tokenizer
from tests.loopback_endpoint import LoopbackEndpoint, Received, error, respond
from tests.unit.training.counted_tasks import OPEN, Counted, options

BOUND_SEC = 60.0


class Held:
    """Holds each response back until `release()`."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self.release = self._released.set

    async def __call__(self, request: web.Request, received: Received) -> web.StreamResponse:
        while not self._released.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        return await respond("yes")(request, received)


class Caller:
    def __init__(self, url: str, session: aiohttp.ClientSession, service: Service | None = None) -> None:
        self.url, self.session, self.service = url, session, service

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.session.get(f"{self.url}/v1/{path}") as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.session.post(f"{self.url}/v1/{path}", json=body or {}) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def submit(self, endpoint: str, status: int = 202, **body: Any) -> Any:
        policy = {"base_url": endpoint, "model": "m"}
        whole = {"tasks": [{"name": "apple"}], "want": "reward", "policy": policy, **body}
        return await self.post("rollouts", whole, status=status)

    async def lines(self, submission: str, *, after: int = 0, wait: float = BOUND_SEC) -> list[Any]:
        """Returns the lines of a submission until it is complete, or until `wait` seconds have passed."""
        query = f"submission={submission}&after={after}&wait={wait}"
        async with self.session.get(f"{self.url}/v1/episodes?{query}") as response:
            assert response.status == 200
            return [json.loads(line) async for line in response.content]

    async def episodes(self, submission: str, **query: Any) -> list[Any]:
        *episodes, end = await self.lines(submission, **query)
        for one in episodes:
            Episode.model_validate(one)
        assert end == {"submission_id": submission, "complete": True}
        return episodes


@asynccontextmanager
async def calling(url: str, service: Service | None = None, **arguments: Any) -> AsyncIterator[Caller]:
    timeout = aiohttp.ClientTimeout(total=2 * BOUND_SEC)
    async with aiohttp.ClientSession(timeout=timeout, **arguments) as session:
        yield Caller(url, session, service)


@asynccontextmanager
async def served(overrides: Sequence[str], **chosen: Any) -> AsyncIterator[Caller]:
    """Runs a service in this process, and interrupts it at the end."""
    service = Service(ServeOptions(port=0, **chosen))
    place = [] if any(one.startswith("resume=") for one in overrides) else ["hydra.run.dir=run"]
    whole = ["env=counted", "tracker=none", *place, *overrides]
    given = {"trainer": service, "policy": service.policy}
    run = await asyncio.to_thread(compose_run, whole, [Path("options")], quiet=True, given=given)
    with run_log(run.log_config, whole):
        running = asyncio.create_task(run.execute())
        try:
            async with asyncio.timeout(BOUND_SEC):
                while not service.url and not running.done():  # noqa: ASYNC110 - it has no event for its tests
                    await asyncio.sleep(0.01)
            if running.done():
                running.result()
            async with calling(service.url, service) as caller:
                yield caller
        finally:
            run.interrupt()
            await finish(asyncio.wait({running}, timeout=BOUND_SEC))


async def until(condition: Any) -> None:
    async with asyncio.timeout(BOUND_SEC):
        while not condition():  # noqa: ASYNC110 - files are looked at
            await asyncio.sleep(0.02)


def open_episodes() -> int:
    return len(list(OPEN.iterdir()))


class ServiceContract:
    overrides: Sequence[str] = ()

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.chdir(tmp_path)
        options(tmp_path / "options")
        OPEN.mkdir()
        yield
        assert (open_episodes(), Counted.open_) == (0, 0)

    @pytest.fixture
    def endpoint(self) -> Any:
        with LoopbackEndpoint(otherwise=respond("yes")) as endpoint:
            yield endpoint

    @asynccontextmanager
    async def served(self, *overrides: str, **chosen: Any) -> AsyncIterator[Caller]:
        async with served([*self.overrides, *overrides], **chosen) as caller:
            yield caller

    async def test_episodes_come_once_in_order(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            tasks = [{"name": "apple"}, {"name": "bread"}]
            ids = ["a0", "a1", "b0", "b1"]
            made = await service.submit(
                endpoint.url, tasks=tasks, n=2, rollout_ids=ids, group_id="g", metadata={"k": 1}
            )
            assert made["rollout_ids"] == ids
            first = await service.episodes(made["submission_id"])
            assert [one["cursor"] for one in first] == [1, 2, 3, 4]
            assert sorted((one["rollout_id"], one["task"]) for one in first) == [
                *(("a0", "apple"), ("a1", "apple"), ("b0", "bread"), ("b1", "bread")),
            ]
            assert all(one["reward"] == 1.0 and one["state"] == "finished" and one["trainable"] for one in first)
            assert all((one["group_id"], one["metadata"], one["error"]) == ("g", {"k": 1}, None) for one in first)
            assert await service.episodes(made["submission_id"]) == first  # until they are acknowledged
            assert await service.post("ack", {"cursor": 3}) == {"freed": 3}
            assert await service.post("ack", {"cursor": 3}) == {"freed": 0}
            assert await service.episodes(made["submission_id"]) == first[3:]
            assert (await service.get("info"))["unacknowledged"] == 1

    async def test_same_ids_start_nothing_again(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            made = await service.submit(endpoint.url, rollout_ids=["x"])
            await service.episodes(made["submission_id"])
            assert await service.submit(endpoint.url, rollout_ids=["x"]) == made
            told = await service.submit(endpoint.url, tasks=[{"name": "bread"}], rollout_ids=["x"], status=409)
            assert told["error"]["type"] == "Conflict"
            for n in (1, 2):
                await service.submit(endpoint.url, n=n, rollout_ids=["x", "y"], status=409)
        assert len(endpoint.requests) == 2

    async def test_cancel_releases_containers(self, endpoint: LoopbackEndpoint) -> None:
        endpoint.otherwise = Held()
        async with self.served("concurrency=2") as service:
            made = await service.submit(endpoint.url, n=3, rollout_ids=["a", "b", "c"])
            await until(lambda: open_episodes() == 2)
            for _ in range(2):
                assert await service.post("rollouts/a/cancel") == {"states": {"a": "cancelled"}}
            assert open_episodes() <= 2
            states = await service.post(f"submissions/{made['submission_id']}/cancel", {"keep": "calls"})
            assert states == {"states": dict.fromkeys("abc", "cancelled")}
            assert open_episodes() == 0
            episodes = await service.episodes(made["submission_id"])
            assert {(one["state"], one["reward"], one["error"]["type"]) for one in episodes} == {
                ("cancelled", None, "Cancelled")
            }

    async def test_failures_have_no_reward(self, endpoint: LoopbackEndpoint) -> None:
        endpoint.then(error(400, "wrong"))
        async with self.served("concurrency=1") as service:
            made = await service.submit(endpoint.url, n=2)
            failed, fine = await service.episodes(made["submission_id"])
        assert (failed["state"], failed["reward"], failed["trainable"]) == ("failed", None, False)
        assert (failed["error"]["stage"], failed["error"]["type"]) == ("policy", "EndpointError")
        assert (fine["state"], fine["reward"]) == ("finished", 1.0)

    async def test_full_service_says_when_to_come_again(self, endpoint: LoopbackEndpoint) -> None:
        endpoint.otherwise = held = Held()
        async with self.served("concurrency=2", queue=4, unacknowledged=5) as service:
            made = await service.submit(endpoint.url, n=4)
            async with service.session.post(
                f"{service.url}/v1/rollouts",
                json={"tasks": [{"name": "apple"}], "policy": {"base_url": endpoint.url, "model": "m"}},
            ) as response:
                assert (response.status, int(response.headers["Retry-After"]) > 0) == (429, True)
            held.release()
            last = (await service.episodes(made["submission_id"]))[-1]
            await service.submit(endpoint.url, n=2, status=429)  # too many that are not acknowledged
            await service.post("ack", {"cursor": last["cursor"]})
            await service.submit(endpoint.url, n=2)

    async def test_failed_attempts_are_replaced(self, endpoint: LoopbackEndpoint) -> None:
        endpoint.then(error(400, "wrong"), error(400, "wrong"), error(400, "wrong"))
        async with self.served("concurrency=1") as service:
            made = await service.submit(endpoint.url, n=2, replace_failed=1)
            lost, fine = await service.episodes(made["submission_id"])
        assert (lost["state"], lost["replaces"], len(lost["losses"])) == ("failed", 0, 1)
        assert (fine["state"], fine["reward"], fine["replaces"]) == ("finished", 1.0, 1)
        assert [(one["attempt"], one["state"], one["error"]["stage"]) for one in fine["losses"]] == [
            (1, "failed", "policy")
        ]

    @pytest.mark.parametrize(("on_stale", "state", "losses"), [("replace", "finished", 1), ("report", "stale", 0)])
    async def test_stale_episodes_are_not_trained_on(
        self, endpoint: LoopbackEndpoint, on_stale: str, state: str, losses: int
    ) -> None:
        endpoint.then(held := Held())
        async with self.served() as service:
            await service.post("versions", {"version": "first", "index": 3})
            made = await service.submit(endpoint.url, max_staleness=0, on_stale=on_stale)
            await until(lambda: endpoint.in_flight)
            assert (await service.post("versions", {"version": "next", "index": 4}))["version"] == "next"
            held.release()
            [episode] = await service.episodes(made["submission_id"])
        assert (episode["state"], len(episode["losses"]), episode["trainable"]) == (state, losses, not losses - 1)
        expected = (["next"], 4, 4, 0) if losses else (["first", "next"], 3, 4, 1)
        names = ("versions", "version_min", "version_max", "staleness")
        assert tuple(episode[name] for name in names) == expected

    async def test_pause_stops_clocks_and_ends(self, endpoint: LoopbackEndpoint) -> None:
        endpoint.then(held := Held())
        async with self.served() as service:
            first = await service.submit(endpoint.url)
            await until(lambda: endpoint.in_flight)
            assert (await service.post("pause", {"for_sec": 600}))["in_flight"] == 1
            held.release()
            assert (await service.post("pause", {"for_sec": 600, "drain_sec": BOUND_SEC}))["in_flight"] == 0
            async with asyncio.timeout(BOUND_SEC):
                while (await service.get(f"rollouts/{first['rollout_ids'][0]}"))["stage"] != "policy":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await service.post("versions", {"version": "new"})
            paused = await service.post("pause", {"for_sec": 0.5})  # and the trainer dies
            assert paused["paused"]["requests"] <= 0.5
            [episode] = await service.episodes(first["submission_id"])
            assert (episode["state"], episode["versions"], len(endpoint.requests)) == ("finished", ["new"], 2)
            await service.post("pause", {"scope": "starts"})
            other = await service.submit(endpoint.url)
            assert await service.lines(other["submission_id"], wait=0.3) == []
            assert (await service.post("resume"))["paused"] == {}
            assert len(await service.episodes(other["submission_id"])) == 1
        row = json.loads(Path("run/episodes.jsonl").read_text().splitlines()[0])
        assert row["phase_sec"]["paused"] > 0

    async def test_expired_lease_cancels(self, endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served_rollouts, "LEASE_CHECK_SEC", 0.05)
        endpoint.otherwise = Held()
        async with self.served() as service:
            kept = await service.submit(endpoint.url, rollout_ids=["kept"])
            made = await service.submit(endpoint.url, rollout_ids=["left"], lease_sec=1.0)
            await until(lambda: open_episodes() == 2)
            await until(lambda: open_episodes() == 1)
            [episode] = await service.episodes(made["submission_id"])
            assert (episode["state"], episode["error"]["type"]) == ("cancelled", "LeaseExpired")
            assert (await service.get("rollouts/kept"))["state"] == "running"
            await service.post(f"submissions/{kept['submission_id']}/cancel")

    async def test_relay_hands_out_unanswered_requests_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_byte_tokenizer(monkeypatch)
        async with self.served() as service:
            assert service.service is not None
            relay = service.service.policy.relay
            made = await service.submit("", want="rows", policy={"mode": "relay", "model": "m"})
            poll = f"requests?submission={made['submission_id']}&wait={BOUND_SEC:g}"
            relay.lease_sec = 0.01
            [first] = (await service.get(poll))["requests"]
            relay.lease_sec = 600.0
            [again] = (await service.get(poll))["requests"]
            assert {**again, "deadline": first["deadline"]} == first
            assert (await service.get("requests"))["requests"] == []
            said = {"ids": [*b"yes", 256], "logprobs": [-0.5] * 4, "version": "1", "stop": "stop"}
            for accepted in (True, False):  # the second sampler is late
                body = {"request_id": first["request_id"], **said}
                assert await service.post("responses", body) == {"accepted": accepted}
            [second] = (await service.get(poll))["requests"]
            await service.post("responses", {"request_id": second["request_id"], **said})
            [episode] = await service.episodes(made["submission_id"])
        [row] = episode["rows"]
        assert (episode["reward"], row["versions"], row["made"]) == (1.0, ["1"], "clean")
        assert row["ids"] == [*second["prompt_ids"], *said["ids"]]
        assert second["prompt_ids"][: len(first["prompt_ids"]) + 4] == [*first["prompt_ids"], *said["ids"]]

    async def test_resumed_service_loses_and_repeats_nothing(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            done = await service.submit(endpoint.url, n=2, rollout_ids=["a", "b"])
            before = await service.episodes(done["submission_id"])
            await service.post("ack", {"cursor": 1, "submission_id": done["submission_id"]})
            policy = {"base_url": endpoint.url, "model": "m", "key": "sk-sent-once"}
            endpoint.then(respond("yes"), Held())
            left = await service.submit(endpoint.url, rollout_ids=["c"], policy=policy)
            await until(lambda: len(endpoint.requests) == 6)
        async with self.served("resume=run") as service:
            assert await service.episodes(done["submission_id"]) == before[1:]
            assert (await service.get("rollouts/c"))["state"] == "waiting"  # its key was in memory only
            assert await service.submit(endpoint.url, rollout_ids=["c"], policy=policy) == left
            [episode] = await service.episodes(left["submission_id"])
            assert (episode["reward"], episode["cursor"], episode["attempt"]) == (1.0, 3, 2)
            assert len(endpoint.requests) == 7  # the first response was taken from the log
            again = await service.submit(endpoint.url)
            assert (await service.episodes(again["submission_id"]))[0]["attempt"] == 3

    async def test_each_rollout_has_its_own_endpoint(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            with LoopbackEndpoint(otherwise=respond("no")) as other:
                policy = {"base_url": endpoint.url, "model": "m", "headers": {"X-Session-ID": "s-{rollout_id}"}}
                made = await service.submit(
                    endpoint.url,
                    n=2,
                    rollout_ids=["a", "b"],
                    policy={**policy, "sampling": {"temperature": 0.5, "max_tokens": 9}, "extra_body": {"top_k": 3}},
                    policies={"b": {"base_url": other.url, "key": "sk-very-secret", "model": "n"}},
                )
                episodes = {one["rollout_id"]: one for one in await service.episodes(made["submission_id"])}
                assert [request.headers["authorization"] for request in other.requests] == ["Bearer sk-very-secret"] * 2
                assert {request.headers["x-session-id"] for request in other.requests} == {"s-b"}
        assert (episodes["a"]["reward"], episodes["b"]["reward"]) == (1.0, 0.0)
        asked = endpoint.requests[0]
        assert (asked.headers["x-session-id"], asked.body["model"], asked.body["top_k"]) == ("s-a", "m", 3)
        assert (asked.body["temperature"], asked.body["max_completion_tokens"]) == (0.5, 9)
        assert not [path for path in Path("run").rglob("*") if path.is_file() and b"sk-very-sec" in path.read_bytes()]
