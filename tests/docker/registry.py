"""A real registry on 127.0.0.1, which engines reach without TLS. It serves one tiny image, and fails on demand.

with Registry() as registry:
    registry.failures = 1  # so many answers are errors of the server first
    ... docker pull {registry.image}@{registry.digest}
"""

import hashlib
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """The registry; `image` is the name of its image without tag or digest, `requests` the paths asked for."""

    def __init__(self) -> None:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("file"))
        blob = layer.getvalue()
        config = json.dumps(
            {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest_of(blob)]}}
        ).encode()
        parts = [
            {"mediaType": kind, "size": len(data), "digest": digest_of(data)}
            for kind, data in (
                ("application/vnd.docker.container.image.v1+json", config),
                ("application/vnd.docker.image.rootfs.diff.tar", blob),
            )
        ]
        manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST, "config": parts[0], "layers": parts[1:]}
        ).encode()
        self.digest = digest_of(manifest)
        self.failures = 0
        self.requests: list[str] = []
        self._contents = {digest_of(data): data for data in (config, blob, manifest)} | {"v1": manifest}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.image = f"127.0.0.1:{self._server.server_port}/tiny"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.requests.append(self.path)
                name = self.path.rpartition("/")[2]
                content = registry._contents.get(name)
                if self.path == "/v2/":
                    status, content = 200, b"{}"
                elif "/manifests/" in self.path and registry.failures > 0:
                    registry.failures -= 1
                    status, content = 503, b"later"
                elif content is None or not self.path.startswith("/v2/tiny/"):
                    status, content = 404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "unknown"}]}'
                else:
                    status = 200
                self.send_response(status)
                self.send_header("Content-Type", MANIFEST if "/manifests/" in self.path else "application/octet-stream")
                self.send_header("Content-Length", str(len(content)))
                if status == 200:
                    self.send_header("Docker-Content-Digest", digest_of(content))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
