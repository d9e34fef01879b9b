"""Loaders with generators of their own resume in their order, and data sets receive the epoch."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from drivetrain.data.open_dataset import open_dataset
from drivetrain.data.prebatched import Batches, PrebatchedLoader
from drivetrain.kernel.batches import ENDLESS, Position
from drivetrain.kernel.errors import DataError

from .thread_world import ThreadSession, on_ranks


@pytest.fixture(autouse=True)
def handler_kept() -> Iterator[None]:
    """Restore the signal handler. A DataLoader with workers installs one, which may
    raise anywhere.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


class KnowsEpochs:
    """A data set whose samples are their index and the epoch that was set."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.epoch])


class Drawn(Sampler[int]):
    """A sampler that shuffles by a generator of Python or of NumPy."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.generator.shuffle(order)
        return iter(order)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a generator of its own": lambda: {"shuffle": True, "generator": seeded()},
    "weights": lambda: {"sampler": WeightedRandomSampler(torch.ones(12), 12, generator=seeded())},
    "Python's": lambda: {"sampler": Drawn(random.Random(5))},
    "NumPy's": lambda: {"sampler": Drawn(numpy.random.default_rng(5))},
    "NumPy's older one": lambda: {"sampler": Drawn(numpy.random.RandomState(5))},
    "persistent workers": lambda: {
        "shuffle": True,
        "num_workers": 1,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
    },
}


def source(kind: str, session: Any = None) -> PrebatchedLoader:
    loader = DataLoader(KnowsEpochs(), batch_size=3, **LOADERS[kind]())  # type: ignore[arg-type,var-annotated]
    return PrebatchedLoader(Batches(loader), session or ThreadSession(), num_epochs=3, seed=5)


def batches(read: PrebatchedLoader, start: Position, num_steps: int) -> tuple[Any, Position]:
    groups = [(group, list(group.microbatches)) for group in read.groups(start, num_steps)]
    return [part.batch.tolist() for _, parts in groups for part in parts], groups[-1][0].next


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_s_own_generator_is_resumed(kind: str) -> None:
    """Resume in mid-epoch, at its end, and in a later epoch. Batches must be those of an
    uninterrupted loader, and each epoch has its own order.
    """
    whole, _ = batches(source(kind), Position(), ENDLESS)
    assert whole[:4] != whole[4:8]
    assert {epoch for batch in whole[4:8] for _, epoch in batch} == {1}
    for stop in (4,) if kind == "persistent workers" else (2, 4, 9):
        first = source(kind)
        found, position = batches(first, Position(), stop)
        begun = json.loads(json.dumps(first.begun(position)))
        later = source(kind)
        later.resume(position, begun)
        assert found + batches(later, position, ENDLESS)[0] == whole
        # and again by the run that was resumed
        later = source(kind)
        later.resume(position, begun)
        _, again = batches(later, position, 1)
        last = source(kind)
        last.resume(again, json.loads(json.dumps(later.begun(again))))
        assert batches(last, again, ENDLESS)[0] == whole[stop + 1 :]


def test_each_rank_has_the_state_of_its_own_loader() -> None:
    def loader(session: Any) -> PrebatchedLoader:
        generator = seeded(session.world.rank)
        own: Any = DataLoader(KnowsEpochs(), batch_size=3, shuffle=True, generator=generator)
        return PrebatchedLoader(Batches(own), session, num_epochs=2)

    def job(session: Any) -> Any:
        whole, _ = batches(loader(session), Position(), ENDLESS)
        first = loader(session)
        found, position = batches(first, Position(), 5)
        begun = first.begun(position)
        later = loader(session)
        later.resume(position, begun)
        assert found + batches(later, position, ENDLESS)[0] == whole
        return begun

    first, _ = on_ranks(job, 2)
    assert len(first["generators"]) == 2
    alone: Any = ThreadSession()
    with pytest.raises(DataError, match="each of 2 ranks had a loader with random numbers"):
        loader(alone).resume(Position(1, 2), first)


@pytest.mark.parametrize(
    ("begun", "error"),
    [
        ({"generators": 5}, ValueError),
        ({"generators": [[{"torch": "AA==", "python": 1}]]}, ValueError),
        ({"generators": [[{"python": [3, [1], None]}]]}, DataError),  # of another kind of loader
        ({"generators": [[]]}, DataError),
    ],
)
def test_states_that_no_run_has_written_are_refused(begun: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        source("a generator of its own").resume(Position(1, 2), begun)


def test_a_damaged_state_is_named() -> None:
    damaged = source("a generator of its own")
    damaged.resume(Position(1, 0), {"generators": [[{"torch": "AAAA"}, {"torch": "AAAA"}][:1]]})
    with pytest.raises(DataError, match="the state of a generator in the checkpoint"):
        batches(damaged, Position(1, 0), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_indexed_data_receive_each_epoch(workers: int) -> None:
    session: Any = ThreadSession()
    data = open_dataset(
        KnowsEpochs(), session, seed=0, workers=workers, global_batch=6, micro_batch=6, shuffle=True
    )
    seen = [
        sorted({int(row[1]) for part in group.microbatches for row in part.batch})
        for group in data.groups(Position(0, 6), 4)
    ]
    assert seen == [[0], [1], [1], [2]]
