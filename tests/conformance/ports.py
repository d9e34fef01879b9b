"""Ports on which the ranks of a test meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle, islice

SHARE = 100
STARTS = range(10_000, 30_000, SHARE)
"""Ports below those that systems give to outgoing connections, of which ranks make many."""


def free_port() -> int:
    """Return a port on which no process listens. Until it is used, nobody else takes it: this
    process alone gives away the ports of its share. Raises `OSError` when there is none.
    """
    _, ports = _own_share()
    for port in islice(ports, SHARE):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # none in TIME_WAIT counts
            probe.bind(("", port))
            return port
    raise OSError(f"all of this process's {SHARE} ports are listened on")


@cache
def _own_share() -> tuple[socket.socket, Iterator[int]]:
    """Bind the first port of a free share, which marks the share as owned. Return that socket and
    the other ports of the share.
    """
    mine = os.getpid() % len(STARTS)
    for first in (*STARTS[mine:], *STARTS[:mine]):
        owner = socket.socket()
        try:
            owner.bind(("127.0.0.1", first))
        except OSError:
            owner.close()
        else:
            return owner, cycle(range(first + 1, first + SHARE))
    raise OSError(f"all ports from {STARTS.start} to {STARTS.stop} have owners")
