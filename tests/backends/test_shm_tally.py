"""Sums in shared memory: the sums of all ranks' numbers, or an error that names the
rank at fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.backends.process_group import shm_tally
from drivetrain.backends.process_group.shm_tally import MOST, SharedMemorySum, opened


class Exchange:
    """A meeting point where threads that play ranks exchange values; returns them in order of
    ranks.
    """

    def __init__(self, size: int) -> None:
        self.received: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self.received[rank] = value
            self.barrier.wait()
            everyone = list(self.received)
            self.barrier.wait()
            return everyone

        return exchange


def on_ranks(
    size: int, act: Callable[[int, SharedMemorySum], Any], timeout_seconds: float = 30.0
) -> list[Any]:
    """Return the values of `act(rank, board)` on `size` ranks, which are threads."""
    exchange = Exchange(size)

    def run(rank: int) -> Any:
        board = opened(rank, size, timeout_seconds, exchange.of(rank))
        assert board is not None
        return act(rank, board)

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(size)]]


numbers = st.floats(-1e12, 1e12)


@given(data=st.data(), size=st.integers(2, 4), waits=st.lists(st.booleans(), max_size=20))
@settings(max_examples=30, deadline=None)
def test_sums_are_equal_everywhere_whenever_they_are_asked_for(
    data: Any, size: int, waits: list[bool]
) -> None:
    """Require equal sums, also if ranks begin the next sum before they read the last one."""
    length = data.draw(st.integers(0, MOST))
    rows = st.lists(numbers, min_size=length, max_size=length)
    shown = [[data.draw(rows) for _ in range(size)] for _ in waits]

    def act(rank: int, board: SharedMemorySum) -> list[list[float]]:
        begun = []
        for turn, at_once in enumerate(waits):
            sums = board.publish(shown[turn][rank])
            if at_once:
                sums()
            begun.append(sums)
        return [sums() for sums in begun]

    expected = [[sum(each) for each in zip(*turn, strict=True)] for turn in shown]
    assert on_ranks(size, act) == [expected] * size


def test_a_rank_that_showed_nothing_is_named() -> None:
    def act(rank: int, board: SharedMemorySum) -> str:
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError) as raised:
            board.publish([1.0])()
        return str(raised.value)

    received, _ = on_ranks(2, act, timeout_seconds=0.2)
    assert received == "rank 1 showed nothing for 0 s"


def test_a_rank_that_is_ahead_is_named() -> None:
    there = threading.Barrier(2, timeout=30)

    def act(rank: int, board: SharedMemorySum) -> str:
        sums = board.publish([1.0])
        if rank == 1:
            board._sums = None  # as if it had not looked
            board.publish([2.0])
            board._sums = None
            board.publish([3.0])
            there.wait()
            return ""
        there.wait()
        with pytest.raises(RuntimeError) as raised:
            sums()
        return str(raised.value)

    assert on_ranks(2, act)[0] == "rank 1 has added up 3 times, and rank 0 1"


def test_a_rank_whose_process_has_ended_is_named() -> None:
    """Require the error before the timeout, even if no process has reaped the ended one."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    board = SharedMemorySum(bytearray(10_000), 0, [os.getpid(), ended.pid], timeout_seconds=60)
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {ended.pid}\) is gone"):
        board.publish([1.0])()
    ended.wait()


def test_half_of_what_is_written_is_not_seen() -> None:
    memory, pids = bytearray(10_000), [os.getpid()] * 2
    boards = [SharedMemorySum(memory, rank, pids, timeout_seconds=0.2) for rank in range(2)]
    boards[1].publish([1.0, 2.0])
    start = boards[1]._start(1, 1)
    memory[start + 8] ^= 1
    with pytest.raises(RuntimeError, match="rank 1 showed nothing"):
        boards[0].publish([1.0, 2.0])()
    memory[start + 8] ^= 1
    boards[0] = SharedMemorySum(memory, 0, pids, timeout_seconds=0.2)
    assert boards[0].publish([3.0, 4.0])() == [4.0, 6.0]


@pytest.mark.parametrize("why", ["no such call", "another machine"])
def test_nobody_has_a_board_that_one_cannot_see(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no such call":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(shm_tally, "_TOKEN_BYTES", 16)
        real = shm_tally._mapped
        monkeypatch.setattr(
            shm_tally, "_mapped", lambda *given: real(*given[:3], b"another's token..")
        )
    exchange = Exchange(2)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(opened, rank, 2, 1.0, exchange.of(rank)) for rank in range(2)]
        assert [each.result() for each in asked] == [None, None]
