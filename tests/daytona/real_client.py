"""The real client of the service, and what the emulator's tests do with it."""

from __future__ import annotations

from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromImageParams, DaytonaConfig, Image

from tests.daytona.emulator import Emulator


def client_of(emulator: Emulator, **changes: str) -> AsyncDaytona:
    """A client, to be closed."""
    return AsyncDaytona(DaytonaConfig(**{"api_key": emulator.api_key, "api_url": emulator.url, **changes}))


async def make(
    client: AsyncDaytona, name: str | None = None, image: str | Image = "debian:bookworm-slim", **more: object
) -> AsyncSandbox:
    """A sandbox whose commands are root's."""
    params = CreateSandboxFromImageParams(name=name, image=image, os_user="root", **more)  # type: ignore[arg-type]
    return await client.create(params, timeout=100)


async def said(sandbox: AsyncSandbox, command: str) -> str:
    """What a command prints."""
    return str((await sandbox.process.exec(command, timeout=30)).result)
