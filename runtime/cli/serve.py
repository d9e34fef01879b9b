"""`drivetrain watch`: the page of runs that are under way, made anew whenever it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..kernel.errors import DrivetrainError, OutputError

__all__ = ["server"]


def server(make: Callable[[], str], host: str, port: int, seconds: float) -> ThreadingHTTPServer:
    """Answers each request for `/` with what `make` returns, which browsers ask for again every
    few `seconds`. `port` 0 takes a free one. Raises `OutputError` for one that is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            try:
                page, status = make(), 200
            except DrivetrainError as error:  # the folder was moved, say, and may come back
                page, status = f"<!doctype html><pre>{type(error).__name__}</pre>", 503
            body = page.encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Length": str(len(body)),
                "Refresh": f"{seconds:g}",
                "Cache-Control": "no-store",
                # the page holds what runs wrote: nothing in it may load or run anything
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise OutputError(f"--host {host} --port {port}: {error}; give another port") from error
