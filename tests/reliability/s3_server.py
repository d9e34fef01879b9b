"""An S3 server in a process of its own (moto's), and a proxy before it that lets requests fail."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["", "500", "503", "slow", "cut upload", "cut download"]
"""Fault of one request. `cut` closes the connection half-way."""

SERVER = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the test has ended, however it did
"""


@dataclass(frozen=True)
class ReceivedRequest:
    """A request to the proxy."""

    method: str
    path: str
    range: str = ""

    @property
    def writes(self) -> bool:
        return self.method in ("PUT", "POST")

    @property
    def num_bytes(self) -> int:
        """Return the length of the requested range."""
        first, _, last = self.range.removeprefix("bytes=").partition("-")
        return int(last) - int(first) + 1


@dataclass
class Proxy:
    """A proxy that forwards requests; `decide` returns the fault of each request."""

    upstream: int
    decide: Callable[[ReceivedRequest], Fault] = lambda request: ""
    log: list[tuple[ReceivedRequest, Fault]] = field(default_factory=list)
    port: int = 0

    def reset(self) -> None:
        self.decide = lambda request: ""
        self.log.clear()

    def faults(self) -> list[Fault]:
        return [fault for _, fault in self.log if fault]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle_one_request()
            return
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        request = ReceivedRequest(self.command, self.path, self.headers.get("Range", ""))
        fault = self.proxy.decide(request)
        self.proxy.log.append((request, fault))
        if fault == "cut upload":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self._hang_up()
            return
        body = self._body()
        if fault in ("500", "503"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "slow":
            time.sleep(0.3)
        self._answer(body, cut=fault == "cut download")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, body: bytes, *, cut: bool) -> None:
        server = HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _PER_CONNECTION}
        headers["Content-Length"] = str(len(body))
        server.request(self.command, self.path, body, headers)
        response = server.getresponse()
        content = response.read()
        self._relay(response, content, cut)
        server.close()

    def _relay(self, response: HTTPResponse, content: bytes, cut: bool) -> None:
        self.send_response(response.status)
        length = response.headers.get("Content-Length") or str(len(content))
        for name, value in response.headers.items():
            if name.lower() not in (*_PER_CONNECTION, "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()


_PER_CONNECTION = ("connection", "content-length", "transfer-encoding", "expect", "keep-alive")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a killed client hangs up."""


@contextlib.contextmanager
def s3_server() -> Iterator[Proxy]:
    """Start a server; yield its proxy."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    ports: list[int] = []
    while not ports:
        line = process.stdout.readline()
        assert line or process.poll() is None, "the S3 server did not start"
        ports = [int(line)] if line.strip().isdigit() else []
    proxy = Proxy(ports[0])
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", 0), handler)
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        process.stdin.close()
        process.stdout.close()
        process.wait(30)
