"""A Hub on loopback, with the part of its API that creating a repository and uploading a folder
need.

It answers `repos/create`, `validate-yaml`, `preupload` (every file is to be sent within the commit,
none through LFS), `commit`, and questions about a model. Nothing is stored but in memory.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNER = "tester"


@dataclass(frozen=True)
class Commit:
    """An upload."""

    repository: str
    revision: str
    message: str
    files: dict[str, bytes]
    token: str | None


@dataclass
class Hub:
    """Requests that the server received. While `gate` is not set, commits wait."""

    endpoint: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    refuses: bool = False

    def answer(self, path: str, body: bytes, token: str | None) -> dict[str, Any]:
        """Return the reply to a POST request. Raises PermissionError for a commit that
        is refused.
        """
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or OWNER}/{asked['name']}"
            self.repositories[name] = asked
            return {"url": f"{self.endpoint}/{name}"}
        if path == "/api/validate-yaml":
            return {}
        _, _, _, owner, name, action, revision = path.split("/")
        if action == "preupload":
            wanted = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": each, **modes} for each in wanted]}
        assert action == "commit"
        assert self.gate.wait(60)
        if self.refuses:
            raise PermissionError
        self.commits.append(_commit(f"{owner}/{name}", revision, body, token))
        number = f"{len(self.commits):040x}"
        url = f"{self.endpoint}/{owner}/{name}/commit/{number}"
        return {"commitUrl": url, "commitOid": number, "pullRequestUrl": None}


def _commit(repository: str, revision: str, body: bytes, token: str | None) -> Commit:
    lines = [json.loads(line) for line in body.splitlines()]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in lines
        if line["key"] == "file"
    }
    return Commit(repository, revision, lines[0]["value"]["summary"], files, token)


@contextmanager
def serving() -> Iterator[Hub]:
    """Start a Hub at `endpoint`, on a free port of this machine."""
    hub = Hub()
    hub.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("/api/models/")[2].partition("?")[0]
            self.reply(200, {"id": name, "tags": ["license:mit"], "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
            try:
                self.reply(200, hub.answer(self.path.partition("?")[0], body, token))
            except PermissionError:
                self.reply(403, {"error": "not yours"})

        def reply(self, code: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *ignored: Any) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
