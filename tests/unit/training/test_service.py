"""The rollout service with the local executor: its contract, what it rejects, and what it stores."""

from __future__ import annotations

from typing import Any

import pytest

from ares_exp.commands.serve import serve_options
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.training.service.openapi import openapi
from ares_exp.training.service.serving import ServeOptions, Service
from tests.loopback_endpoint import LoopbackEndpoint
from tests.service_contract import ServiceContract, calling

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tasks": [{"name": "aple"}]}, "Did you mean `apple`?"),
    ({"rollout_ids": ["a", "a"], "n": 2}, "Expected 2 different rollout_ids"),
    ({"unknown": 1}, "expected `unknown` to be absent"),
    ({"policy": {"model": "m"}}, "Expected `policy.base_url`"),
    ({"policy": {"model": "m", "base_url": "ftp://x"}}, "base_url"),
    ({"policy": {"model": "m", "base_url": "http://x", "key": "env:ABSENT_KEY"}}, "ABSENT_KEY"),
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
            assert (await service.get("tasks?after=bread"))["next"] is None
            made = await service.submit(endpoint.url, rollout_ids=["x"])
            await service.episodes(made["submission_id"])
            shown = await service.get("rollouts/x")
            assert (shown["state"], shown["calls"], shown["cursor"], shown["task"]) == ("finished", 2, 1, "apple")
            await service.get("rollouts/y", status=404)
            assert await service.get("openapi.json") == openapi()


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
