"""A W&B service on the loopback: as much of its protocol as the real client needs to upload a run, and no more.

The client asks GraphQL at `/graphql`, streams history and summary to `/files/<entity>/<project>/<run>/file_stream`, and
uploads files to the addresses that it is given. What arrives is kept, to be looked at. That an artifact with a known
name and digest is the version that is there already is W&B's documented behaviour.
"""

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.recorded import data_in

LEAVES_FOLDERS = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
"""Of a table that was logged online, W&B leaves a temporary folder until the garbage collector finds it."""


@dataclass
class ServedArtifact:
    """What the client said of an artifact."""

    id: str
    type: str
    name: str
    digest: str
    run: str
    state: str = "PENDING"
    used_by: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        contents: dict[str, Any] = json.loads(self.files["wandb_manifest.json"])["contents"]
        return contents


class WandbService:
    """Serves on a separate port from `start` to `close`.

    Attributes:
        runs: The variables of every `UpsertBucket`, by run id.
        lines: The lines of each streamed file (`wandb-history.jsonl`, …) by run id and file.
        exit_codes: The exit codes with which each run ended, by run id.
        artifacts: Every artifact, in the order of their creation.
        views: The variables of every saved view.
        unknown: Requests that it does not understand.
        mood: `well`; `broken`: every response is a 500; `refusing`: a 403; `silent`: nothing is answered until
            `recover` or `close`, and then the connections are cut.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.lines: dict[tuple[str, str], dict[int, Any]] = {}
        self.run_files: dict[tuple[str, str], bytes] = {}
        self.exit_codes: dict[str, list[int]] = {}
        self.artifacts: list[ServedArtifact] = []
        self.views: list[dict[str, Any]] = []
        self.unknown: list[str] = []
        self.asked: list[str] = []
        self.mood = "well"
        self.changed = threading.Condition()
        self._answering = threading.Event()
        service = self

        class Handler(_Handler):
            served = service

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="wandb-service")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._answering.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def recover(self) -> None:
        self.mood = "well"
        self._answering.set()

    def wait_for_recovery(self) -> None:
        self._answering.wait()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 30.0) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, timeout)

    @property
    def everything(self) -> list[bytes]:
        told = [json.dumps(one).encode() for one in (self.runs, [*self.lines.items()])]
        return [*told, *self.run_files.values(), *(one for each in self.artifacts for one in each.files.values())]

    def respond(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(operation)
        response = getattr(self, f"_{operation}", None)
        if response is None:
            self.unknown.append(operation)
            return {}
        data: dict[str, Any] = response(variables)
        return data

    def upload(self, path: str, body: bytes) -> None:
        _, kind, owner, name = path.split("/", 3)
        if kind == "artifact":
            self.artifacts[int(owner)].files[name] = body
        else:
            self.run_files[owner, name] = body

    def stream(self, path: str, body: dict[str, Any]) -> None:
        run = path.split("/")[-2]
        for name, chunk in body.get("files", {}).items():
            lines = self.lines.setdefault((run, name), {})
            for number, line in enumerate(chunk["content"], chunk["offset"]):
                lines[number] = json.loads(line) if name.startswith("wandb-") else line
        if body.get("complete"):
            self.exit_codes.setdefault(run, []).append(body["exitcode"])

    def _Viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["name"]
        project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
        return {"model": {**project, "bucket": self._bucket(run) if run in self.runs else None}}

    def _bucket(self, run: str) -> dict[str, Any]:
        history, summary = ServedRun(self, run).history, ServedRun(self, run).summary
        config = {key: value for one in self.runs[run] for key, value in json.loads(one["config"]).items()}
        bucket = {"id": f"id-{run}", "name": run, "displayName": run, "tags": [], "notes": None}
        bucket |= {"config": json.dumps(config), "summaryMetrics": json.dumps(summary), "eventsTail": "[]"}
        bucket |= {"historyTail": json.dumps([json.dumps(line) for line in history[-1:]])}
        bucket |= {"historyLineCount": len(history), "logLineCount": 0, "eventsLineCount": 0}
        return bucket | {"wandbConfig": '{"t": 1}'}  # without it the client assumes that the run never started

    def _UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["name"]
        inserted = run not in self.runs
        self.runs.setdefault(run, []).append(variables)
        project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
        return {"upsertBucket": {"bucket": {**self._bucket(run), "project": project}, "inserted": inserted}}

    def _CreateArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        asked = variables["input"]
        name, digest = asked["artifactCollectionName"], asked["digest"]
        known = [one for one in self.artifacts if (one.name, one.digest, one.state) == (name, digest, "COMMITTED")]
        if not known:
            made = (f"artifact-{len(self.artifacts)}", asked["artifactTypeName"], name, digest, asked["runName"])
            known = [ServedArtifact(*made)]
            self.artifacts += known
        found = known[0]
        sequence = {"id": f"sequence-{name}", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": found.id, "state": found.state, "artifactSequence": sequence}}}

    def _CreateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(variables["artifactID"])}}

    def _UpdateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = variables["artifactManifestID"].removeprefix("manifest-")
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(artifact)}}

    def _manifest(self, artifact: str) -> dict[str, Any]:
        url = self._artifact_url(artifact, "wandb_manifest.json")
        return {"id": f"manifest-{artifact}", "file": {"id": "f", "uploadUrl": url, "uploadHeaders": []}}

    def _CreateArtifactFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        edges = []
        for one in variables["input"]["artifactFiles"]:
            node = dict.fromkeys(("id", "name", "displayName", "storagePath"), one["name"])
            url = self._artifact_url(one["artifactID"], one["name"])
            upload = {"uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None}
            edges.append({"node": {**node, **upload, "artifact": {"id": one["artifactID"]}}})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _CommitArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        found = self._artifact(variables["artifactID"])
        found.state = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": found.id, "digest": found.digest}}}

    def _UseArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        asked = variables["input"]
        found = self._artifact(asked["artifactID"])
        found.used_by.append(asked["runName"])
        return {"useArtifact": {"artifact": {"id": found.id, "digest": found.digest}}}

    def _CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["run"]
        files = [{"name": name, "uploadUrl": f"{self.url}/run/{run}/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": f"id-{run}", "uploadHeaders": [], "files": files}}

    def _UpsertView2(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.views.append(variables)
        return {"upsertView": {"view": {"id": "view", "name": variables["name"]}, "inserted": True}}

    def _ArtifactType(self, variables: dict[str, Any]) -> dict[str, Any]:
        types = [one.type for one in self.artifacts if one.name == variables["name"].partition(":")[0]]
        return {"project": {"artifact": {"artifactType": {"name": types[0]}} if types else None}}

    def _ArtifactByID(self, variables: dict[str, Any]) -> dict[str, Any]:
        found = self._artifact(variables["id"])
        project = {"id": "p", "internalId": "p", "name": "a-project", "entity": {"name": "me"}}
        sequence = {"__typename": "ArtifactSequence", "id": f"sequence-{found.name}", "name": found.name}
        sequence |= {"project": project}
        told = {"id": found.id, "state": found.state, "digest": found.digest, "artifactSequence": sequence}
        told |= {"artifactType": {"name": found.type}, "versionIndex": 0, "description": None, "metadata": "{}"}
        told |= {"ttlDurationSeconds": -1, "ttlIsInherited": True, "tags": [], "historyStep": None, "size": 1}
        told |= {"commitHash": None, "fileCount": 1, "createdAt": "2026-01-01", "updatedAt": None, "aliases": []}
        return {"artifact": told}

    def _artifact(self, artifact_id: str) -> ServedArtifact:
        return next(one for one in self.artifacts if one.id == artifact_id)

    def _artifact_url(self, artifact_id: str, name: str) -> str:
        return f"{self.url}/artifact/{self.artifacts.index(self._artifact(artifact_id))}/{name}"


def wandb_sync(run_dir: Path) -> None:
    """Uploads the offline runs below a folder by W&B's own command, as a user types it."""
    command = [sys.executable, "-m", "wandb", "sync", *map(str, run_dir.rglob("offline-run-*"))]
    done = subprocess.run(command, cwd=run_dir, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class ServedRun:
    """What arrived of a run."""

    def __init__(self, service: WandbService, run_id: str = "run-1") -> None:
        self._service = service
        self._id = run_id

    @property
    def first(self) -> dict[str, Any]:
        return self._service.runs[self._id][0]

    @property
    def raw_config(self) -> dict[str, Any]:
        configs = [json.loads(one["config"]) for one in self._service.runs[self._id] if one.get("config")]
        return {key: one["value"] for config in configs for key, one in config.items()}

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in self.raw_config.items() if key != "_wandb"}

    @property
    def history(self) -> list[dict[str, Any]]:
        return [line for _, line in sorted(self._service.lines.get((self._id, "wandb-history.jsonl"), {}).items())]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.history if "progress/finished" in row]

    @property
    def summary(self) -> dict[str, Any]:
        lines = self._service.lines.get((self._id, "wandb-summary.json"), {})
        return dict(lines[max(lines)]) if lines else {}

    @property
    def step_metrics(self) -> dict[str, str]:
        """The axis of each metric, as W&B's config spells it: 1 is a name, 2 a pattern, 5 the position of the axis."""
        metrics = self.raw_config["_wandb"]["m"]
        return {one.get("1") or one["2"]: metrics[one["5"] - 1]["1"] for one in metrics if "5" in one}

    @property
    def exit_codes(self) -> list[int]:
        return self._service.exit_codes.get(self._id, [])

    def artifacts(self, kind: str) -> list[ServedArtifact]:
        runs = ((one, {one.run, *one.used_by}) for one in self._service.artifacts)
        return [one for one, its in runs if one.type == kind and self._id in its]

    @property
    def tables(self) -> list[ServedArtifact]:
        return self.artifacts("wandb-run-incremental-table")

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows of the table of episodes as it is shown: of the parts that its last value names."""
        shown = self.summary["episodes"]
        names = [path.rpartition("/")[2] for path in (*shown["previous_increments_paths"], shown["artifact_path"])]
        parts = [json.loads(one.files[name]) for name in names for one in self.tables if name in one.files]
        assert len(parts) == len(names)
        return [dict(zip(part["columns"], row, strict=True)) for part in parts for row in part["data"]]

    def page(self, cell: dict[str, Any]) -> str:
        """The episodes of a page that a cell of the table names, as JSON."""
        page = next(one.files[cell["path"]] for one in self.tables if cell["path"] in one.files).decode()
        return json.dumps(data_in(page)[1])


class _Server(ThreadingHTTPServer):
    """A thread for each connection; a disconnected client is not an error."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    served: WandbService
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        if self._moody():
            return
        with self.served.changed:
            if self.path == "/graphql":
                asked = json.loads(body)
                operation = asked.get("operationName") or asked["query"].split("(")[0].split("{")[0].split()[-1]
                response = {"data": self.served.respond(operation, asked.get("variables") or {})}
            else:
                if self.path.endswith("/file_stream"):  # the others are the client's own telemetry
                    self.served.stream(self.path, json.loads(body))
                response = {}
            self.served.changed.notify_all()
        self._reply(response)

    def do_PUT(self) -> None:
        body = self._body()
        if self._moody():
            return
        with self.served.changed:
            self.served.upload(self.path, body)
            self.served.changed.notify_all()
        self._reply({})

    def _moody(self) -> bool:
        """Deals with the request as the mood says, unless it is well."""
        mood = self.served.mood
        if mood == "broken":
            self._reply({}, 500)
        elif mood == "refusing":
            self._reply({"errors": [{"message": "permission denied"}]}, 403)
        elif mood == "silent":
            self.served.wait_for_recovery()
            self.close_connection = True
        return mood != "well"

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, data: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""
