"""Images made of a base image and one layer of captured changes, loaded once for all containers with those changes.

The loaded archive names the layers of the base without containing them: the engine looks a layer up by the digests of
all layers down to it, before it opens the layer's file. An engine that does not (the containerd image store) refuses,
and `changed_files` writes the files instead.

An image belongs to this process, has its labels, and is removed with the last container that uses it.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import logging
import os
import secrets
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from ares_exp.cancellation import finish
from ares_exp.containers.docker.container_lifetime import why_it_stays
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.delta_encoding import encode
from ares_exp.containers.filesystem.layer import write_layer
from ares_exp.containers.images.shared_work import Demand, WorkAbandoned, share

_LAYER = "changes/layer.tar"
_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1024 * 1024

_logger = logging.getLogger(__name__)
# Loads compete for disk and cores: more at once do not finish earlier.
_slots = threading.BoundedSemaphore(4)


class ThinLoadRefused(Exception):
    """The engine cannot load an image whose base layers are not in the archive."""


@dataclass(slots=True)
class _Image:
    name: str
    users: int = 0
    is_loaded: bool = False


_lock = threading.Lock()
_images: dict[tuple[int, str, str], _Image] = {}


class DerivedImage:
    """One use of a derived image. Made by `borrow`, ended by `give_back`.

    Attributes:
        name: The image's name.
    """

    def __init__(self, engine: Engine, key: tuple[int, str, str], image: _Image) -> None:
        self.name = image.name
        self._engine = engine
        self._key = key
        self._image: _Image | None = image

    def has_vanished(self) -> None:
        """Notes that the engine has it no more, by no deed of ours: the next `borrow` loads it again."""
        if self._image is not None:
            self._image.is_loaded = False

    async def give_back(self) -> None:
        """Removes the image after its last use. Idempotent, never raises for a missing image."""
        with _lock:
            image, self._image = self._image, None
            if image is None:
                return
            image.users -= 1
            if image.users:
                return
            del _images[self._key]  # a later `borrow` loads it under another name
        problem = await in_thread(lambda: _remove(self._engine, image.name), pool="removals")
        if problem:
            _logger.info("The image %s stays until the next run: %s.", image.name, problem)


async def borrow(engine: Engine, base: dict[str, Any], changes: StoredChanges) -> DerivedImage:
    """Provides an image of `base` with `changes`, loaded unless this process already uses an equal one.

    When the last waiter for a load is cancelled, the load is aborted and its result removed.

    Args:
        engine: The engine.
        base: The inspected base image.
        changes: Relative to that image.

    Raises:
        ThinLoadRefused: The engine cannot load such an image.
        SnapshotMetadataError: An object of the changes is missing or damaged.
    """
    key = (os.getpid(), engine.host, await asyncio.to_thread(_digest, changes))
    with _lock:
        image = _images.setdefault(key, _Image(f"ares-exp/changes:{secrets.token_hex(8)}"))
        image.users += 1
    borrowed = DerivedImage(engine, key, image)
    try:
        await share(f"{engine.host} {image.name}", lambda demand: _load_once(engine, base, changes, image, demand))
    except BaseException:
        await finish(borrowed.give_back())
        raise
    return borrowed


def _digest(changes: StoredChanges) -> str:
    hashed = hashlib.sha256()
    for line in encode(changes.delta):
        hashed.update(line + b"\n")
    return hashed.hexdigest()


def _load_once(engine: Engine, base: dict[str, Any], changes: StoredChanges, image: _Image, demand: Demand) -> None:
    if image.is_loaded:
        return
    with _slots, tempfile.TemporaryFile(prefix="ares_exp-layer-") as file:
        demand.pause(0)
        layers = _write_image(file, base, changes, image.name)
        try:
            _load(engine, image.name, file, demand)
            found = engine.api.inspect_image(image.name)["RootFS"]["Layers"]
            if found != layers:
                raise ThinLoadRefused(f"expected it to have the layers {layers}, found {found}")
            demand.pause(0)  # else an abandoned image would stay
        except engine_errors() as error:
            raise ThinLoadRefused(reason(error)) from error
        except (WorkAbandoned, ThinLoadRefused):
            _remove(engine, image.name)
            raise
    image.is_loaded = True


def _write_image(file: IO[bytes], base: dict[str, Any], changes: StoredChanges, name: str) -> list[str]:
    """Writes the archive in the format of `docker save`; returns the layers of the image."""
    file.seek(_BLOCK)  # space for the header, which has the size
    layer = _Hashed(file)
    write_layer(changes, layer)
    layers = [*base["RootFS"]["Layers"], f"sha256:{layer.hash.hexdigest()}"]
    config = _config(base, name, layers)
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    missing = [f"base-{number}/layer.tar" for number in range(len(layers) - 1)]
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [*missing, _LAYER]}]
    for member, content in ((config_name, config), ("manifest.json", json.dumps(manifest).encode())):
        file.write(_header(member, len(content)) + content + bytes(-len(content) % _BLOCK))
    file.write(bytes(2 * _BLOCK))
    file.seek(0)
    file.write(_header(_LAYER, layer.size))
    return layers


class _Hashed:
    """A writer that hashes and counts; a layer is named by the hash of its archive."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes, /) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.size += len(data)


def _config(base: dict[str, Any], name: str, layers: list[str]) -> bytes:
    """Returns the image's configuration: the base's, with its variables, user and directory."""
    given = dict(base["Config"] or {})
    given["Labels"] = {**(given.get("Labels") or {}), **image_labels(name, keep=False)}
    kept = {key: base[old] for key, old in _PLATFORM.items() if base.get(old)}
    rest = {"config": given, "created": datetime.datetime.now(datetime.UTC).isoformat(), "history": []}
    return json.dumps({**kept, **rest, "rootfs": {"type": "layers", "diff_ids": layers}}).encode()


_PLATFORM = {"architecture": "Architecture", "os": "Os", "variant": "Variant"}


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)  # one block, also for more than 8 GiB


def _load(engine: Engine, name: str, file: IO[bytes], demand: Demand) -> None:
    """Loads the archive. The engine reports errors in the stream of its answer."""

    def pieces() -> Iterator[bytes]:
        file.seek(0)
        while piece := file.read(_PIECE):
            demand.pause(0)
            yield piece

    for event in engine.api.load_image(pieces()):
        if "error" in event:
            raise ThinLoadRefused(str(event["error"]))


def _remove(engine: Engine, name: str) -> str:
    return why_it_stays(lambda: engine.api.remove_image(name))
