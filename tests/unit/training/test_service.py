"""The rollout service with the local executor: its contract, what it rejects, and what it stores."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import threading
from array import array
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ares_exp.commands.serve import serve_options
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.records.run_dir import resume_command
from ares_exp.runs.composing import compose_run
from ares_exp.training.service.service_record import ServiceRecord
from ares_exp.training.service.serving import ServeOptions, Service, openapi
from tests.byte_tokenizer import use_byte_tokenizer
from tests.loopback_endpoint import LoopbackEndpoint, completion, json_body
from tests.service_contract import BOUND_SEC, ServiceContract, calling
from tests.token_engine import TokenEngine, samples

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tasks": [{"name": "aple"}]}, "Did you mean `apple`?"),
    ({"rollout_ids": ["a", "a"], "n": 2}, "Expected 2 distinct rollout_ids"),
    ({"unknown": 1}, "expected `unknown` to be absent"),
    ({"policy": {"model": "m"}}, "Expected `policy.base_url`"),
    ({"policy": {"model": "m", "base_url": "ftp://x"}}, "base_url"),
    ({"policy": {"model": "m", "base_url": "http://x", "key": "env:ABSENT_KEY"}}, "ABSENT_KEY"),
    ({"policy": {"model": "m", "base_url": "http://x", "wire": "ids", "tokenizer": "/absent"}}, "tokenizer"),
    ({"policy": {"model": "m", "base_url": "http://x", "on_abort": "continue"}}, '"ids" or "sglang"'),
    ({"policies": {"a": {"modle": 1}}, "rollout_ids": ["a"]}, "expected `a.modle` to be absent"),
]
"""Submissions, and parts of their rejections."""


class TestService(ServiceContract):
    """The contract, and what does not depend on the executor."""

    async def test_requests_need_the_key(self, endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SERVICE_KEY", "k-123456")
        async with self.served(key_env="SERVICE_KEY") as service:
            await service.get("info", status=401)
            async with calling(service.url, headers={"Authorization": "Bearer k-123456"}) as with_key:
                assert (await with_key.get("info"))["protocol"] == 1

    async def test_only_a_service_resumes_its_run(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            await service.submit(f"{endpoint.url}/v1")
        assert resume_command(Path("run")) == "ares-exp serve resume=run"
        with pytest.raises(ConfigError, match=r"is a service for trainers\. Use `ares-exp serve resume=.*run`"):
            await asyncio.to_thread(compose_run, ["resume=run"], [Path("options")], quiet=True)

    async def test_wrong_requests_are_rejected(self) -> None:
        async with self.served() as service:
            for body, said in WRONG:
                told = await service.submit("http://127.0.0.1:1/v1", status=400, **body)
                assert said in told["error"]["message"]
            assert (await service.get("info"))["capacity"] == {"running": 0, "waiting": 0, "limit": 1024}
            for headers in ({"Origin": "http://evil"}, {"Host": "evil:80"}):
                async with calling(service.url, headers=headers) as page:
                    await page.get("info", status=403)

    async def test_tasks_and_rollouts_are_shown(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            page = await service.get("tasks?limit=2")
            assert ([one["name"] for one in page["tasks"]], page["next"]) == (["apple", "bread"], "bread")
            assert page["tasks"][1]["metadata"] == {"digest": "digest of bread"}
            assert (await service.get("tasks?after=bread"))["next"] is None
            made = await service.submit(endpoint.url, rollout_ids=["x"])
            await service.episodes(made["submission_id"])
            shown = await service.get("rollouts/x")
            assert (shown["state"], shown["calls"], shown["cursor"], shown["task"]) == ("finished", 2, 1, "apple")
            await service.get("rollouts/y", status=404)
            assert await service.get("openapi.json") == openapi()

    async def test_rows_and_calls_are_what_was_sampled(self, endpoint: LoopbackEndpoint) -> None:
        endpoint.otherwise = engine = TokenEngine(["yes"])
        found = {}
        async with self.served("concurrency=1") as service:
            wanted = (("rows", "json", None), ("rows", "packed", 11), ("calls", "packed", None), ("rows", "", 1))
            for want, encoding, limit in wanted:
                body = {"want": want, "encoding": encoding or "json", "limits": {"row_tokens": limit}}
                made = await service.submit(endpoint.url, **body)
                [found[want, encoding]] = await service.episodes(made["submission_id"])
        assert (found["rows", ""]["rows"], found["rows", ""]["trainable"]) == ([], False)  # no sampled token is left
        [row] = found["rows", "json"]["rows"]
        first, second = engine.calls[:2]
        assert row["ids"] == [*second.prompt, *second.completion]
        assert (row["made"], row["cut"], row["versions"], row["prompt_tokens"]) == (
            *("clean", 0, ["step-7"]),
            len(first.prompt),
        )
        [cut] = found["rows", "packed"]["rows"]
        assert (list(unpacked("i", cut["ids"])), cut["cut"]) == (row["ids"][:11], len(row["ids"]) - 11)
        assert list(unpacked("B", cut["mask"])) == row["mask"][:11]
        assert list(unpacked("f", cut["logprobs"])) == pytest.approx(row["logprobs"][:11])
        call = found["calls", "packed"]["calls"][1]
        assert list(unpacked("i", call["prompt_ids"])) == list(second.prompt)
        assert list(unpacked("i", call["ids"])) == list(second.completion)

    async def test_calls_without_tokens_are_no_rows(self, endpoint: LoopbackEndpoint) -> None:
        async with self.served() as service:
            made = await service.submit(endpoint.url, want="rows")
            [episode] = await service.episodes(made["submission_id"])
        assert (episode["state"], episode["reward"], episode["trainable"]) == ("finished", 1.0, False)
        assert (episode["error"]["stage"], episode["rows"]) == ("rows", None)

    async def test_client_that_leaves_cuts_no_submission(
        self, endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append, writing, may_go_on = ServiceRecord.append, threading.Event(), threading.Event()

        def slowly(record: ServiceRecord, line: Any) -> None:
            writing.set()
            assert may_go_on.wait(BOUND_SEC)
            append(record, line)

        monkeypatch.setattr(ServiceRecord, "append", slowly)
        async with self.served() as service:
            leaving = asyncio.create_task(service.submit(endpoint.url, rollout_ids=["x"]))
            assert await asyncio.to_thread(writing.wait, BOUND_SEC)
            leaving.cancel()
            await asyncio.wait({leaving})
            again = asyncio.create_task(service.submit(endpoint.url, rollout_ids=["x"]))
            may_go_on.set()
            assert len(await service.episodes((await again)["submission_id"])) == 1
        lines = (Path("run/service") / "record.jsonl").read_text().splitlines()
        assert sum("body" in json.loads(line) for line in lines) == 1

    async def test_failed_write_ends_the_service(
        self, endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.EIO, "wrong", "run/service/1.json")

        monkeypatch.setattr(ServiceRecord, "add_episode", full)

        async def submit() -> None:
            async with self.served("concurrency=1") as service:
                made = await service.submit(endpoint.url, n=3)
                await service.lines(made["submission_id"])

        with pytest.raises((OSError, aiohttp.ClientError)):
            await submit()

    async def test_limits_and_aborts_of_a_rollout(self, endpoint: LoopbackEndpoint) -> None:
        aborted = completion("ye", model="m")
        aborted["choices"][0]["finish_reason"] = "abort"
        async with self.served() as service:
            endpoint.then(json_body(aborted))
            made = await service.submit(endpoint.url, limits={"steps": 1, "seconds": 60})
            [episode] = await service.episodes(made["submission_id"])
            assert (episode["state"], episode["finish"], len(endpoint.requests)) == ("truncated", "steps", 2)
            endpoint.then(json_body(aborted))
            policy = {"base_url": endpoint.url, "model": "m", "on_abort": "fail"}
            made = await service.submit(endpoint.url, policy=policy)
            [episode] = await service.episodes(made["submission_id"])
            assert (episode["state"], episode["error"]["stage"], len(endpoint.requests)) == ("failed", "policy", 3)

    @pytest.mark.parametrize("wire", ["ids", "sglang"])
    async def test_aborted_response_is_continued(
        self, endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch, wire: str
    ) -> None:
        use_byte_tokenizer(monkeypatch)
        aborts = [samples("", "abort"), samples("y", "abort", policy_version="16")]
        endpoint.then(*aborts, samples("es"), samples("yes"))
        policy = {"base_url": endpoint.url, "model": "m", "wire": wire, "on_abort": "continue"}
        async with self.served() as service:
            await service.post("versions", {"version": "17"})
            made = await service.submit(endpoint.url, want="rows", policy={**policy, "sampling": {"max_tokens": 9}})
            [episode] = await service.episodes(made["submission_id"])
        first, second, third, fourth = (one.body for one in endpoint.requests)
        assert (episode["reward"], episode["versions"]) == (1.0, ["16", "17"])
        assert second["prompt"] == first["prompt"]
        assert (third["prompt"], third["max_tokens"]) == ([*first["prompt"], ord("y")], 8)
        [row] = episode["rows"]
        assert (row["made"], row["ids"][: len(fourth["prompt"])]) == ("clean", fourth["prompt"])


def unpacked(kind: str, text: str) -> array[Any]:
    return array(kind, base64.b64decode(text))


def test_service_without_a_key_needs_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        Service(ServeOptions(host="0.0.0.0")).check(None, [])  # type: ignore[arg-type]
    with pytest.raises(PreflightError, match="ABSENT_KEY"):
        Service(ServeOptions(key_env="ABSENT_KEY")).check(None, [])  # type: ignore[arg-type]


def test_serve_options_are_checked() -> None:
    assert serve_options(["serve.port=0", "serve.key_env=null"]) == ServeOptions(port=0)
    with pytest.raises(ConfigError, match=r"Did you mean `serve\.port`"):
        serve_options(["serve.prt=1"])
    with pytest.raises(ConfigError, match="queue"):
        serve_options(["serve.queue=0"])
