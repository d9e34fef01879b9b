"""The connections that joining a process group opens, which a survivor of a dead rank closes.

gloo reports a dead rank only to the ranks that talk to it; the others wait until the time limit,
and nothing that gloo offers wakes them. A call whose connections are shut down fails at once. This
holds for further groups of the same ranks, too, which are created in `of_further_groups`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from ... import lost_ranks
from .start import second_client

__all__ = ["Connections", "of_further_groups"]


class Connections(AbstractContextManager["Connections"]):
    """The connections that are opened in the block. They are shut down when a rank dies in it, or
    in `closed_on_loss`; without a launcher that reports dead ranks, never."""

    def __init__(self) -> None:
        self._before: dict[int, str] = {}
        self._opened: dict[int, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Connections:
        if lost_ranks.is_reported():
            self._before = _sockets()
            self._stack.enter_context(lost_ranks.waking(lambda: _shut_down(self._new())))
        return self

    def __exit__(self, *error: object) -> None:
        if lost_ranks.is_reported():
            self._opened = self._new()
        self._stack.close()

    def store(self, store: Any) -> Any:
        """Return the store by a connection of its own, which is one of these: a rank may wait in
        it for a key of a dead rank."""
        return second_client(store) if lost_ranks.is_reported() else store

    @contextmanager
    def closed_on_loss(self) -> Iterator[None]:
        """Shut the connections down if a rank dies in the block."""
        _present.append(self)
        try:
            with lost_ranks.waking(lambda: _shut_down(self._opened)):
                yield
        finally:
            _present.remove(self)

    def add(self, others: Connections) -> None:
        """Count the connections of others among these."""
        self._opened = {**self._opened, **others._opened}

    def _new(self) -> dict[int, str]:
        """Return the sockets that were not open before."""
        return {d: name for d, name in _sockets().items() if self._before.get(d) != name}


_present: list[Connections] = []
"""The connections of the session of this process."""


@contextmanager
def of_further_groups() -> Iterator[None]:
    """Count the connections that are opened in the block among those of the session."""
    with Connections() as further:
        yield
    for session in _present:
        session.add(further)


def _sockets() -> dict[int, str]:
    """Return the sockets of this process: descriptor, and the system's own name of the socket."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found


def _shut_down(sockets: dict[int, str]) -> None:
    """Shut down those of the sockets that are connected. A descriptor that is another socket by now
    is left alone."""
    now = _sockets()
    for descriptor, name in sockets.items():
        if now.get(descriptor) != name:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family != socket.AF_UNIX:
                connection.getpeername()  # raises for one that listens: there gloo would abort
                connection.shutdown(socket.SHUT_RDWR)
