"""What an image has at a path, without starting anything: asked of a container that is created and never started."""

from __future__ import annotations

import base64
import json
import posixpath
import secrets

from ares_exp.containers.docker.creation import create
from ares_exp.containers.docker.engine import INQUIRY_TIMEOUT_SEC, Engine, EngineError
from ares_exp.containers.docker.life import NAME_PREFIX, remove
from ares_exp.containers.ownership import owner_labels

_DIRECTORY = 1 << 31  # of Go's file mode, which the engine reports


class BaseFiles:
    """Looks into one image; remembers what it found. Blocking: for a thread, one at a time."""

    def __init__(self, engine: Engine, image: str) -> None:
        """Makes nothing yet."""
        self._engine = engine
        self._image = image
        self._container: str | None = None
        self._modes: dict[str, int | None] = {"/": _DIRECTORY}

    def has(self, path: str) -> bool:
        """Whether there is something, be it a link that leads nowhere.

        Raises:
            EngineError, docker.errors.DockerException, requests.exceptions.RequestException: The engine refused, or is
                gone; `ImageNotFound` among them.
        """
        return self._mode(path) is not None

    def _mode(self, path: str) -> int | None:
        """The mode of what is there, `None` for nothing. The engine would follow links above it: they are no place."""
        if path not in self._modes:
            above = self._mode(posixpath.dirname(path))
            self._modes[path] = self._asked(path) if above is not None and above & _DIRECTORY else None
        return self._modes[path]

    def _asked(self, path: str) -> int | None:
        engine = self._engine
        if self._container is None:
            name = f"{NAME_PREFIX}base-{secrets.token_hex(6)}"
            request = engine.api.create_container_config(
                self._image, ["-"], labels=owner_labels(), network_disabled=True, host_config={}
            )
            self._container = name
            create(engine, name, request)
        answer = engine.api.head(
            f"{engine.api.base_url}/v{engine.api.api_version}/containers/{self._container}/archive",
            params={"path": path},
            timeout=INQUIRY_TIMEOUT_SEC,
        )
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise EngineError(f"it does not say whether its image has {path!r}", answer.status_code)
        found: int = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))["mode"]
        return found

    def close(self) -> None:
        """Removes the container, if there is one. Idempotent."""
        container, self._container = self._container, None
        if container is not None:
            remove(self._engine, container)
