"""`drivetrain watch` among clients that are hostile, or that only connect and leave."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from drivetrain.cli.report import serve
from drivetrain.cli.report.serve import PageServer, Served, is_this_machine

PAGE = "<p>the page</p>" * 1000


class Drawing:
    """A page that records how it was drawn."""

    def __init__(self) -> None:
        self.version = 0
        self.times = 0
        self.at_once = 0
        self._lock = threading.Lock()
        self.threads: set[int] = set()

    def make(self) -> str:
        assert self._lock.acquire(blocking=False), "two threads draw"
        self.threads.add(threading.get_ident())
        self.times += 1
        time.sleep(0.02)
        self._lock.release()
        return PAGE


@pytest.fixture
def drawing() -> Drawing:
    return Drawing()


@pytest.fixture
def port(drawing: Drawing) -> Iterator[int]:
    served = Served(drawing.make, lambda: drawing.version)
    with PageServer(served, "127.0.0.1", 0, 5.0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield serving.server_port
        finally:
            serving.shutdown()
            thread.join(20)
            assert not thread.is_alive()


def ask(port: int, request: str | None = None, seconds: float = 10.0) -> str:
    """Send a request; return the whole answer."""
    request = request or f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as client:
        client.sendall(request.encode())
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        ("GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        ("GET /\r\n\r\n", 400),
        ("\x00\xff\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nhost:localhost:8000\r\n\r\n", 200),
        ("HEAD / HTTP/1.1\r\nHost: [::1]:1\r\n\r\n", 200),
    ],
)
def test_who_is_answered(request_: str, status: int, port: int) -> None:
    answer = ask(port, request_)
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert ("the page" in answer) == (status == 200 and request_.startswith("GET"))


def test_names_of_this_machine() -> None:
    assert is_this_machine("box:80", "box") and is_this_machine("LOCALHOST.", "127.0.0.1")
    assert is_this_machine("192.168.1.7:80", "0.0.0.0") and is_this_machine("[fe80::1]:1", "::")
    assert is_this_machine(socket.gethostname(), "0.0.0.0")
    assert not is_this_machine("192.168.1.7:80", "127.0.0.1")
    assert not is_this_machine("evil.example", "0.0.0.0")


def test_one_thread_draws_once_a_change(port: int, drawing: Drawing) -> None:
    with ThreadPoolExecutor(40) as many:
        answers = list(many.map(ask, [port] * 200))
    assert all(answer.endswith(PAGE) for answer in answers)
    assert drawing.times == 1
    drawing.version = 1
    ask(port)
    ask(port)
    assert drawing.times == 2 and len(drawing.threads) == 1


def test_clients_that_send_nothing_hold_up_nobody(port: int) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(300):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET / HT")
        assert PAGE in ask(port)
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # the last of them is still connected
            client.recv(1)
        assert threading.active_count() <= before + 2


def slow(client: socket.socket) -> None:
    """Send a request one letter at a time, without an end."""
    for letter in itertools.chain("GET / HTTP/1.1\r\nHost: x\r\nA: ", itertools.repeat("b")):
        client.sendall(letter.encode())
        time.sleep(0.1)


def endless(client: socket.socket) -> None:
    for _ in range(1000):
        client.sendall(b"GET / HTTP/1.1\r\nA: " + b"b" * 10_000)


@pytest.mark.parametrize("act", [lambda client: None, slow, endless])
def test_clients_have_so_much_time_and_room(
    act: Callable[[socket.socket], None], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_REQUEST_SECONDS", 0.5)
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    with client, suppress(ConnectionError):
        act(client)
        assert client.recv(1) == b"", "it is closed, or reset"
    assert PAGE in ask(port)


def test_more_clients_than_there_may_be_are_sent_away(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MAX_CLIENTS", 3)
    with ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(4)
        ]
        assert held[3].recv(1) == b""
    time.sleep(0.2)
    assert PAGE in ask(port)


def test_resets_say_nothing(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for request in (b"", b"GET / HT", f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()):
        for _ in range(5):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(request)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # by a reset
    assert PAGE in ask(port)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
