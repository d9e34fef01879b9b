"""`drivetrain watch`: serves the page of runs that are in progress.

One thread renders the page, when it is requested and something has changed. One event loop answers
all clients; their number, and the time of each, are limited.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType

from ...kernel.errors import DrivetrainError, OutputError
from ...run.page_script import content_security_policy

__all__ = ["PageServer", "Served"]

_MAX_CLIENTS = 500
_MAX_REQUEST_BYTES = 16 << 10
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_BETWEEN_DRAWINGS = 0.2
_GONE = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError)
"""A client that went away, or that took too long or sent too much."""


@dataclass
class Served:
    """A page that is rendered again when something has changed."""

    make: Callable[[], str]
    changes: Callable[[], Hashable]
    """Returns a value that changes whenever the page may have changed."""
    _seen: Hashable = field(default_factory=object)
    _kept: tuple[HTTPStatus, bytes] = (HTTPStatus.SERVICE_UNAVAILABLE, b"")

    def now(self) -> tuple[HTTPStatus, bytes]:
        """Return the status and the page. For one thread at a time."""
        seen = self.changes()
        if seen != self._seen:
            self._seen, self._kept = seen, self._drawn()
        return self._kept

    def _drawn(self) -> tuple[HTTPStatus, bytes]:
        try:
            return HTTPStatus.OK, self.make().encode(errors="replace")
        except DrivetrainError as error:  # the folder was moved, say, and may come back
            text = f"<!doctype html><pre>{type(error).__name__}</pre>"
            return HTTPStatus.SERVICE_UNAVAILABLE, text.encode()


class PageServer:
    """Answers requests for `/` with a page that refreshes itself in the browser. Where there is no
    page yet, browsers try again after `seconds`.

    Requests must name this machine, so that no page of another host can read what is served here.
    """

    def __init__(self, served: Served, host: str, port: int, seconds: float) -> None:
        """`port` 0 takes a free one. Raises `OutputError` for one that is taken."""
        self._served, self._host, self._seconds = served, host, seconds
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=_MAX_CLIENTS)
        except (OSError, OverflowError, UnicodeError) as error:
            raise OutputError(f"--host {host} --port {port}: {error}; give another port") from error
        self.server_port: int = self._socket.getsockname()[1]
        self._drawing: asyncio.Future[tuple[HTTPStatus, bytes]] | None = None
        self._drawn_at = 0.0
        self._clients = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_serving = threading.Event()
        self._pen = ThreadPoolExecutor(1, "draws the page")

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pen.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def serve_forever(self) -> None:
        """Serve until `shutdown`, or Ctrl-C."""
        asyncio.run(self._serve())

    def shutdown(self) -> None:
        """End `serve_forever`, which another thread runs."""
        self._is_serving.wait(_REQUEST_SECONDS)
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda loop, context: None)  # such as resets
        server = await asyncio.start_server(
            self._client, sock=self._socket, limit=_MAX_REQUEST_BYTES, backlog=_MAX_CLIENTS
        )
        self._is_serving.set()
        async with server:
            await self._stop.wait()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= _MAX_CLIENTS:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_SECONDS)
                await asyncio.wait_for(self._answer(head, writer), _ANSWER_SECONDS)
        except _GONE:
            pass
        finally:
            self._clients -= 1
            with suppress(*_GONE):
                writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        status, body = refusal(head, self._host), b""
        if status is None:
            status, body = await self._page()
        reply = [f"HTTP/1.1 {status.value} {status.phrase}", *self._headers(status, body), "", ""]
        writer.write("\r\n".join(reply).encode())
        if not head.startswith(b"HEAD "):
            writer.write(body)
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    def _headers(self, status: HTTPStatus, body: bytes) -> list[str]:
        again = [f"Refresh: {self._seconds:g}"] if status is HTTPStatus.SERVICE_UNAVAILABLE else []
        return [
            *again,
            "Content-Type: text/html; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            # the page holds what runs wrote: nothing but its own script may run
            f"Content-Security-Policy: {content_security_policy()}",
            "X-Content-Type-Options: nosniff",
            "Cross-Origin-Resource-Policy: same-origin",
            "Connection: close",
        ]

    async def _page(self) -> tuple[HTTPStatus, bytes]:
        """Render the page once for all requests that arrive meanwhile."""
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.ensure_future(self._draw())
        return await asyncio.shield(self._drawing)

    async def _draw(self) -> tuple[HTTPStatus, bytes]:
        await asyncio.sleep(self._drawn_at + _BETWEEN_DRAWINGS - time.monotonic())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pen, self._served.now)
        finally:
            self._drawn_at = time.monotonic()


def refusal(head: bytes, host: str) -> HTTPStatus | None:
    """Return the status of a request that is refused; None for one that gets the page."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return HTTPStatus.BAD_REQUEST
    names = [line[5:].strip() for line in lines if line[:5].lower() == "host:"]
    if len(names) != 1:
        return HTTPStatus.BAD_REQUEST
    if not is_this_machine(names[0], host):
        return HTTPStatus.MISDIRECTED_REQUEST
    if words[0] not in ("GET", "HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED
    return None if words[1] == "/" else HTTPStatus.NOT_FOUND


def is_this_machine(name: str, host: str) -> bool:
    """Return True if a `Host` header names the machine that serves at `host`. A page of another
    site, whose name was made to resolve to this machine, sends the name of that site."""
    bare = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
    bare = bare.removeprefix("[").removesuffix("]").lower().rstrip(".")
    known = {host.lower(), "localhost", "127.0.0.1", "::1"}
    if host in ("", "0.0.0.0", "::"):  # at all of its addresses, by any name of its own
        known |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        with suppress(ValueError):
            ipaddress.ip_address(bare)
            return True
    return bare in known
