"""The routes of the API: sandboxes and snapshots."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from aiohttp import web
from daytona_api_client_async import models

from tests.daytona.emulator.sandboxes import GONE, NETWORK, Sandbox, Snapshot
from tests.daytona.emulator.wire import Refusal, answer, received

if TYPE_CHECKING:
    from tests.daytona.emulator.emulator import Emulator


PAGE_SIZE = 2
"""Bound on the sandboxes and snapshots in one answer."""

PATIENCE_SEC = 0.5
"""The longest time that a response about a sandbox waits for its start to end."""


class Api:
    """The requests of the API, one method per route."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._sandboxes = emulator.service

    def routes(self) -> list[web.RouteDef]:
        one = "/api/sandbox/{id}"
        return [
            web.post("/api/sandbox", self.create),
            web.get("/api/sandbox", self.list),
            web.get(one, self.get),
            web.delete(one, self.delete),
            web.post(one + "/snapshot", self.snapshot),
            web.post(one + "/last-activity", self.last_activity),
            web.post(one + "/network-settings", self.network_settings),
            web.post(one + "/ttl/{minutes}", self.ttl),
            web.get("/api/snapshots", self.list_snapshots),
            web.get("/api/snapshots/{id}", self.get_snapshot),
            web.delete("/api/snapshots/{id}", self.delete_snapshot),
            web.post("/api/snapshots/{id}/activate", self.activate_snapshot),
            web.get("/api/object-storage/push-access", self.push_access),
        ]

    async def create(self, request: web.Request) -> web.Response:
        return self._shown(self._sandboxes.create(await received(request, models.CreateSandbox)))

    async def list(self, request: web.Request) -> web.Response:
        query = request.query
        labels = json.loads(query.get("labels") or "{}")
        after = int(query.get("cursor") or 0)
        found = [
            sandbox
            for sandbox in self._sandboxes.by_id.values()
            if sandbox.number > after
            and sandbox.state not in GONE
            and labels.items() <= sandbox.labels.items()
            and query.get("name", "") in sandbox.name
        ]
        page = found[:PAGE_SIZE]
        cursor = str(page[-1].number) if len(found) > PAGE_SIZE else None
        items = [sandbox.shown(self._emulator.base, in_list=True) for sandbox in page]
        return answer(models.ListSandboxesResponse, {"items": items, "nextCursor": cursor})

    async def get(self, request: web.Request) -> web.Response:
        sandbox = self._asked(request)
        if sandbox.life is not None and not sandbox.life.done():  # spares clients that poll once a second the second
            await asyncio.wait({sandbox.life}, timeout=PATIENCE_SEC)
        return self._shown(sandbox)

    async def delete(self, request: web.Request) -> web.Response:
        sandbox = self._asked(request)
        self._sandboxes.delete(sandbox)
        return self._shown(sandbox)

    async def snapshot(self, request: web.Request) -> web.Response:
        asked = await received(request, models.CreateSandboxSnapshot)
        sandbox = self._asked(request)
        self._sandboxes.take_snapshot(sandbox, asked["name"])
        return self._shown(sandbox)

    async def last_activity(self, request: web.Request) -> web.Response:
        self._asked(request)  # none is stopped for being idle
        return web.Response(status=201)

    async def network_settings(self, request: web.Request) -> web.Response:
        asked = await received(request, models.UpdateSandboxNetworkSettings)
        sandbox = self._asked(request)
        box = self._sandboxes.running(sandbox, "Sandbox is not started")
        sandbox.network |= {name: asked[name] for name in NETWORK if name in asked}
        await box.set_network(blocked=sandbox.is_cut_off)
        return self._shown(sandbox)

    async def ttl(self, request: web.Request) -> web.Response:
        sandbox = self._asked(request)
        self._sandboxes.set_ttl(sandbox, int(request.match_info["minutes"]))
        return self._shown(sandbox)

    async def list_snapshots(self, request: web.Request) -> web.Response:
        page, found = int(request.query.get("page") or 1), [*self._sandboxes.snapshots.values()]
        items = [one.shown() for one in found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]]
        pages = -(-len(found) // PAGE_SIZE)
        return answer(
            models.PaginatedSnapshots, {"items": items, "total": len(found), "page": page, "totalPages": pages}
        )

    async def get_snapshot(self, request: web.Request) -> web.Response:
        return answer(models.SnapshotDto, self._snapshot(request).shown())

    async def delete_snapshot(self, request: web.Request) -> web.Response:
        del self._sandboxes.snapshots[self._snapshot(request).name]
        return web.Response(status=200)

    async def activate_snapshot(self, request: web.Request) -> web.Response:
        snapshot = self._snapshot(request)
        if snapshot.state == "active":
            raise Refusal(400, f"Snapshot {snapshot.name} is already active")
        snapshot.state = "active"
        return answer(models.SnapshotDto, snapshot.shown())

    async def push_access(self, request: web.Request) -> web.Response:
        raise Refusal(503, "Object storage is not configured")

    def _asked(self, request: web.Request) -> Sandbox:
        return self._sandboxes.find(request.match_info["id"])

    def _snapshot(self, request: web.Request) -> Snapshot:
        found = self._sandboxes.find_snapshot(request.match_info["id"])
        if found is None:
            raise Refusal(404, f"Snapshot {request.match_info['id']} not found")
        return found

    def _shown(self, sandbox: Sandbox) -> web.Response:
        return answer(models.Sandbox, sandbox.shown(self._emulator.base))
