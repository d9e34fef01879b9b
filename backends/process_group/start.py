"""The time before ranks have a store to meet at."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ... import lost_ranks

__all__ = [
    "CONNECT_LIMIT",
    "await_ranks",
    "await_server",
    "late_store_named",
    "lost_store_named",
    "second_client",
    "served_by_rank_0",
]

CONNECT_LIMIT = timedelta(seconds=60)
"""Limit for connecting to a running server. It takes as long as the machine is busy, and no rank is
waited for, so a shorter limit of collectives does not apply.
"""
_LOOK_SECONDS = 0.2
_MOST_SECONDS = 5.0


def await_server(host: str, port: str, rank: int, seconds: float) -> None:
    """Wait for the server of the store, which runs in the process of rank 0, or of the launcher.

    Raises RuntimeError after `seconds`. torch's own client would wait as long, and then raise an
    error that names only the address, below the stacks of its own code.
    """
    if rank == 0 or not served_by_rank_0():
        return  # a launcher serves it before it starts ranks
    deadline, why = time.monotonic() + seconds, None
    while (left := deadline - time.monotonic()) > 0:
        why = _unanswered(host, port, min(left, _MOST_SECONDS))
        if why is None:
            return
        time.sleep(_LOOK_SECONDS)
    raise RuntimeError(
        f"rank 0, whose process serves the store at {host}:{port}, has not come in {seconds:g} s "
        f"(timeout_seconds): {why}"
    )


def await_ranks(store: Any, place: str, rank: int, size: int, seconds: float) -> None:
    """Wait until every rank has come to `place`, in Python, so that signals are handled meanwhile.
    Raises RuntimeError after `seconds`; the watch, if there is one, ends the run before.
    """
    keys = [f"drivetrain/{place}/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    deadline, pause = time.monotonic() + seconds, 0.01
    while not store.check(keys):
        if lost_ranks.is_new():
            raise RuntimeError("a rank has died or joined, and the ranks meet again")
        if time.monotonic() > deadline:
            absent = [str(n) for n, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(f"ranks that have not come in {seconds:g} s: {', '.join(absent)}")
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)


def served_by_rank_0() -> bool:
    """Return True if rank 0's process serves the store, not the launcher's."""
    launched = "MASTER_ADDR" in os.environ
    return launched and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def second_client(store: Any) -> Any:
    """Return a further connection to the server of `store`, with the same time limit.

    Raises RuntimeError at once where the server is gone, and after `CONNECT_LIMIT` where it does
    not answer. torch's own client would try again for as long in both cases.
    """
    limit = store.timeout
    seconds, deadline = _MOST_SECONDS, time.monotonic() + max(limit, CONNECT_LIMIT).total_seconds()
    try:
        while True:
            store.set_timeout(timedelta(seconds=seconds))
            try:
                client = store.clone()
                break
            except RuntimeError as error:
                left = deadline - time.monotonic()
                if left <= 0 or _is_refused():
                    how = "does not answer" if left <= 0 else "is gone"
                    raise RuntimeError(
                        f"the store at {_address()}, in the process of rank 0 or of the launcher, "
                        f"{how}: {error}"
                    ) from error
                seconds = min(2 * seconds, max(left, 1.0))  # a busy server answers late
    finally:
        store.set_timeout(limit)
    client.set_timeout(limit)
    return client


def _is_refused() -> bool:
    """Return True if no process listens at the address of the store, as far as it is known."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        return False
    return isinstance(_unanswered(host, port, _MOST_SECONDS), ConnectionRefusedError)


def _unanswered(host: str, port: str, seconds: float) -> OSError | None:
    """Return the error of a connection; None if a process listens at the address."""
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except OSError as error:
        return error
    return None


@contextlib.contextmanager
def late_store_named(call: str, rank: int, stall_seconds: float | None) -> Iterator[None]:
    """Print after `stall_seconds` which process serves the store that this rank waits for."""
    if stall_seconds is None:
        yield
        return

    def name() -> None:
        print(
            f"rank 0 has kept others waiting for {stall_seconds:.0f} s: the store at {_address()}, "
            "in its process or in the launcher's, does not answer, and "
            f"rank {rank} waits in {call!r}",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(stall_seconds, name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def lost_store_named(store: Any) -> Iterator[None]:
    """Name the process that served the store in errors that its loss causes."""
    try:
        yield
    except RuntimeError as error:
        try:
            store.check(["drivetrain/any"])
        except RuntimeError:
            raise RuntimeError(
                f"the store at {_address()}, in the process of rank 0 or of the launcher, is gone"
            ) from error
        raise


def _address() -> str:
    return ":".join(os.environ.get(f"MASTER_{word}", "?") for word in ("ADDR", "PORT"))
