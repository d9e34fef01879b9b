"""Aborts: all ranks together, or some ranks, whose reason the others receive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from drivetrain.backends.process_group.stall_watch import Watch


@pytest.fixture
def pair() -> Iterator[tuple[Watch, Watch]]:
    """Yield two ranks in one process. Each waits at most a fifth of a second for the other."""
    store = dist.HashStore()
    first, second = (Watch(store, store, rank, 2, 0.6, 60.0) for rank in (0, 1))
    for each in (first, second):
        each.start()
    yield first, second
    for each in (first, second):
        each.stop()


def test_if_all_ranks_give_up_they_may_resume_together(pair: tuple[Watch, Watch]) -> None:
    with ThreadPoolExecutor() as threads:
        for _ in range(3):
            answers = threads.map(lambda each: each.give_up("no memory", retry=True), pair)
            assert list(answers) == [True, True]
    assert [each.verdict for each in pair] == ["", ""]


def test_if_one_rank_gives_up_the_others_receive_its_reason(pair: tuple[Watch, Watch]) -> None:
    """Require that the other rank receives the reason. The aborting rank has no verdict of its own,
    which would end it, and cannot take its abort back.
    """
    first, second = pair
    assert not first.give_up("rank 0 has no memory", retry=True)
    assert (second.verdict, second.stalled) == ("rank 0 has no memory", [0])
    assert first.verdict == "" and not first.give_up("once more", retry=True)


def test_a_rank_that_ends_only_waits_until_its_reason_is_received(
    pair: tuple[Watch, Watch],
) -> None:
    """Require that the first reason is sent. A rank with a reason of its own does not wait for
    others.
    """
    first, second = pair
    assert not first.give_up("a bad sample", retry=False)
    began = time.monotonic()
    assert not second.give_up("another one", retry=False)
    assert time.monotonic() - began < 0.05
    assert (second.verdict, first.verdict) == ("a bad sample", "")


def test_a_store_that_is_gone_or_stands_still_keeps_nobody() -> None:
    over = threading.Event()

    class Stuck:
        def compare_set(self, *key_and_values: str) -> None:
            over.wait(60)
            raise RuntimeError("the store is gone")

    alone = Watch(dist.HashStore(), Stuck(), 0, 2, 0.6, 60.0)
    began = time.monotonic()
    assert not alone.give_up("a bad sample", retry=False)
    assert time.monotonic() - began < 1.0
    over.set()
