"""A registry for npm and uv on 127.0.0.1 with packages of the test's own; it misbehaves on demand."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ares_exp.agents.toolbox.package import AgentPackage, Build, NpmTarball, this_machine


def tgz(files: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """A tarball as npm makes them: below `package/`. A `TarInfo` is taken as it is."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def pinned(data: bytes, *, package: str = "@tests/tiny", version: str = "1.2.3", **more: Any) -> NpmTarball:
    integrity = f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"
    return NpmTarball(package, version, integrity, len(data), 10_000_000, **more)


def tiny_package(tarball: NpmTarball, *, name: str = "tiny") -> AgentPackage:
    """An agent that is one tarball."""
    build = Build(name, tarball.version, this_machine(), "any", (tarball,))
    return AgentPackage(name, "Tiny", tarball.version, "MIT", ("messages",), (build,))


class NpmRegistry:
    """Serves `pages` at their paths and `data` at every other path; a context manager.

    Attributes:
        data: What is served.
        pages: What is served at some paths.
        cut: So many responses are cut in the middle.
        hold: While it is set, a response stops in the middle, when `reached` is set, until it is cleared.
        requests: Path of each request.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pages: dict[str, bytes] = {}
        self.cut = 0
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.requests: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> bytes:
                data = registry.pages.get(self.path, registry.data)
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if data.startswith(b"<") else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                return data

            def do_GET(self) -> None:
                registry.requests.append(self.path)
                data = self.do_HEAD()
                with suppress(OSError):  # whoever is refused bytes hangs up
                    self._write(data, len(data) // 2)

            def _write(self, data: bytes, half: int) -> None:
                self.wfile.write(data[:half])
                registry.reached.set()
                registry.go_on.wait()
                if registry.cut:
                    registry.cut -= 1
                    return
                self.wfile.write(data[half:])

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def publish(self, name: str, version: str, files: Mapping[str, bytes], **facts: Any) -> None:
        facts |= {"name": name, "version": version}
        data = tgz({"package.json": json.dumps(facts).encode(), **files})
        place, pin = f"/{name}-{version}.tgz", pinned(data)
        dist = {"tarball": f"{self.url}{place}", "integrity": pin.integrity}
        page = {"name": name, "dist-tags": {"latest": version}, "versions": {version: {**facts, "dist": dist}}}
        self.pages |= {place: data, f"/{name.replace('/', '%2f')}": json.dumps(page).encode()}

    def publish_wheel(self, name: str, version: str, files: Mapping[str, bytes], entry_points: str) -> None:
        info, buffer = f"{name}-{version}.dist-info", io.BytesIO()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        wheel = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        members = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
        members |= {f"{info}/entry_points.txt": entry_points.encode()}
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, content in members.items():
                archive.writestr(path, content)
            archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*members, f"{info}/RECORD")))
        file = f"{name}-{version}-py3-none-any.whl"
        page = f"<html><body><a href='{self.url}/{file}'>{file}</a></body></html>".encode()
        self.pages |= {f"/{file}": buffer.getvalue(), f"/simple/{name}/": page}

    def __enter__(self) -> NpmRegistry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
