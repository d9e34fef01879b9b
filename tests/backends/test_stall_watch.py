"""Aborts: all ranks together, or some ranks, whose reason the others receive."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.backends.process_group.stall_watch import Watch


class Recorded:
    """A store that records which of its methods are called."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.calls = store, []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.store, name)


@pytest.fixture
def stores() -> tuple[Recorded, Recorded]:
    """Return the stores by which each of two ranks aborts. They hold the same."""
    store = dist.HashStore()
    return Recorded(store), Recorded(store)


@pytest.fixture
def pair(stores: tuple[Recorded, Recorded]) -> Iterator[tuple[Watch, Watch]]:
    """Yield two ranks in one process. Each waits at most a second for the other."""
    store = stores[0].store
    first, second = (Watch(store, stores[rank], rank, 2, 3.0, 60.0) for rank in (0, 1))
    for each in (first, second):
        each.start()
    yield first, second
    for each in (first, second):
        each.stop()


def verdict_received_by(watch: Watch) -> str:
    """Wait for another rank's reason: a busy machine may let this rank's thread look late."""
    while not watch.verdict:
        time.sleep(0.01)
    return watch.verdict


def test_if_all_ranks_abort_they_may_resume_together(pair: tuple[Watch, Watch]) -> None:
    with ThreadPoolExecutor() as threads:
        for _ in range(3):
            answers = threads.map(lambda each: each.abort("no memory", retry=True), pair)
            assert list(answers) == [True, True]
    assert [each.verdict for each in pair] == ["", ""]


def test_if_one_rank_gives_up_the_others_receive_its_reason(pair: tuple[Watch, Watch]) -> None:
    """Require that the other rank receives the reason. The aborting rank has no verdict of its own,
    which would end it, and cannot take its abort back.
    """
    first, second = pair
    assert not first.abort("rank 0 has no memory", retry=True)
    assert verdict_received_by(second) == "rank 0 has no memory" and second.stalled == [0]
    assert first.verdict == "" and not first.abort("once more", retry=True)


def test_a_rank_that_ends_only_waits_until_its_reason_is_received(
    pair: tuple[Watch, Watch], stores: tuple[Recorded, Recorded]
) -> None:
    """Require that the first reason is sent. A rank with a reason of its own asks no others."""
    first, second = pair
    assert not first.abort("a bad sample", retry=False)
    assert verdict_received_by(second) == "a bad sample"
    assert not second.abort("another one", retry=False)
    assert stores[0].calls and not stores[1].calls
    assert (second.verdict, first.verdict) == ("a bad sample", "")


def test_a_store_that_is_gone_or_stands_still_keeps_nobody() -> None:
    over = threading.Event()

    class Stuck:
        has_answered = False

        def compare_set(self, *key_and_values: str) -> None:
            over.wait(60)
            self.has_answered = True
            raise RuntimeError("the store is gone")

    stuck = Stuck()
    alone = Watch(dist.HashStore(), stuck, 0, 2, 0.6, 60.0)
    assert not alone.abort("a bad sample", retry=False)
    assert not stuck.has_answered
    over.set()


def test_tensors_of_a_function_that_has_returned_are_not_kept() -> None:
    """Require that they are freed between two heartbeats, which are two seconds apart."""
    store = Recorded(dist.HashStore())
    watch = Watch(store, store.store, 0, 2, 60.0, 60.0)

    def returning_after_a_heartbeat() -> weakref.ref[torch.Tensor]:
        tensor, num_sent = torch.zeros(8), store.calls.count("set")
        while store.calls.count("set") == num_sent:
            time.sleep(0.01)
        return weakref.ref(tensor)

    watch.start()
    try:
        assert returning_after_a_heartbeat()() is None
    finally:
        watch.stop()
