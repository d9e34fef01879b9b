"""The order of samples, its division into steps, and how samples are fetched."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling
from trainer.problems import eval_groups

from drivetrain.data.indexed import Loader, steps_per_epoch
from drivetrain.data.order import Order, sequential, shuffled
from drivetrain.data.positions import position_from_json, position_to_json
from drivetrain.kernel.batches import Group, Microbatch, Position
from drivetrain.kernel.errors import DataError, DataFailed, SettingError, WorkerFailed

quickly = settings(deadline=None, max_examples=30)

Sample = tuple[Any, ...]


class Squares:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Squares):
    """Data that draws from each generator that a data set may use."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(torch.rand(())), float(numpy.random.rand())


class Broken(Squares):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("no such picture")
        return index


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class BrokenOddly(Squares):
    def __getitem__(self, index: int) -> int:
        raise Unpicklable("out of ", "ink")


class Killed(Squares):
    """Data whose worker crashes, or is killed as by the kernel when memory is short."""

    def __init__(self, size: int, by: int = signal.SIGKILL) -> None:
        super().__init__(size)
        self.by = by

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), self.by)
        return index


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def read(loader: Loader, start: Position, num_steps: int) -> list[tuple[Group, list[Microbatch]]]:
    return [(group, timeless(group.microbatches)) for group in loader.groups(start, num_steps)]


def timeless(microbatches: Iterable[Microbatch]) -> list[Microbatch]:
    """Return the microbatches without the time that they took, so that they can be compared."""
    return [each._replace(seconds=(0.0, 0.0)) for each in microbatches]


def samples(microbatches: Iterable[Microbatch]) -> list[Any]:
    """Return the samples that count."""
    return [sample for each in microbatches for sample in each.batch[: each.num_samples]]


def joined(parts: Iterable[list[Microbatch]]) -> list[Any]:
    return samples(chain.from_iterable(parts))


# --- the order --------------------------------------------------------------------------------


@quickly
@given(st.integers(1, 3000), st.integers(-(2**40), 2**70), st.integers(0, 10**6))
def test_shuffled_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = shuffled(num_samples, seed, epoch)
    assert len(order) == num_samples
    assert sorted(torch.as_tensor(order[:]).tolist()) == list(range(num_samples))


@quickly
@given(st.integers(1, 2000), st.data())
def test_a_slice_is_a_part_of_the_whole(num_samples: int, data: st.DataObject) -> None:
    bound = st.none() | st.integers(-num_samples - 2, num_samples + 2)
    step = st.none() | st.integers(1, 5)
    part = slice(data.draw(bound), data.draw(bound), data.draw(step))
    order = shuffled(num_samples, 1, 2)
    assert torch.as_tensor(order[part]).tolist() == torch.as_tensor(order[:]).tolist()[part]


def test_a_slice_of_a_billion_computes_the_slice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    arange = torch.arange

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        result = arange(*args, **options)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(torch, "arange", counted)
    order = shuffled(10**9, 0, 0)
    indices = torch.as_tensor(order[987_654_321 : 987_654_321 + 64])
    assert sizes == [64]
    assert len(set(indices.tolist())) == 64
    assert all(index in range(10**9) for index in indices.tolist())


@pytest.mark.parametrize("num_samples", [10, 64, 100, 257])
def test_every_sample_is_as_likely_at_every_position(num_samples: int) -> None:
    num_epochs = 1500
    counts = torch.zeros(num_samples, num_samples)
    for epoch in range(num_epochs):
        counts[torch.arange(num_samples), torch.as_tensor(shuffled(num_samples, 3, epoch)[:])] += 1
    expected = num_epochs / num_samples
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (num_samples - 1) ** 2
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbours_are_unrelated() -> None:
    order = torch.as_tensor(shuffled(20_000, 0, 0)[:]).double()
    for lag in (1, 2, 141, 142):  # 142: the side of the square that the cipher works on
        pair = torch.stack([order[:-lag], order[lag:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.03


def test_small_orders_reach_every_permutation() -> None:
    seen = {tuple(torch.as_tensor(shuffled(4, 0, epoch)[:]).tolist()) for epoch in range(500)}
    assert len(seen) == 24


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    orders = {
        tuple(torch.as_tensor(shuffled(50, seed, epoch)[:]).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_the_order_is_the_same_on_every_machine_and_release() -> None:
    assert torch.as_tensor(shuffled(10, 1, 2)[:]).tolist() == [5, 2, 8, 9, 3, 7, 0, 1, 6, 4]
    assert list(sequential(4, 1, 2)[1:3]) == [1, 2]


# --- division into steps ----------------------------------------------------------------------

divisions = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 60),
        "num_readers": st.integers(1, 5),
        "global_batch": st.integers(5, 20),
        "micro_batch": st.integers(1, 8),
        "drop_last": st.booleans(),
    }
)


def loaders(division: dict[str, Any], **options: Any) -> list[Loader]:
    division = dict(division)
    dataset, num_readers = Squares(division.pop("num_samples")), division.pop("num_readers")
    return [
        Loader(
            dataset,
            **division,
            collate=as_list,
            num_readers=num_readers,
            reader_index=index,
            **options,
        )
        for index in range(num_readers)
    ]


@quickly
@given(divisions)
def test_readers_and_microbatches_together_are_the_order(division: dict[str, Any]) -> None:
    num_samples, global_batch = division["num_samples"], division["global_batch"]
    if division["drop_last"] and num_samples < global_batch:
        return
    num_steps = steps_per_epoch(num_samples, global_batch, division["drop_last"])
    kept = num_samples - num_samples % global_batch if division["drop_last"] else num_samples
    readers = [read(loader, Position(), 2 * num_steps) for loader in loaders(division, seed=4)]
    for epoch in (0, 1):
        order = torch.as_tensor(shuffled(num_samples, 4, epoch)[:]).tolist()
        seen: list[int] = []
        for step in range(epoch * num_steps, (epoch + 1) * num_steps):
            groups = [reader[step][0] for reader in readers]
            parts = [reader[step][1] for reader in readers]
            group = joined(parts)
            assert groups[0].position == Position(epoch, len(seen))
            seen += group
            assert {each.num_samples for each in groups} == {len(group)}
            assert {len(part) for part in parts} == {groups[0].num_microbatches}
            for part in parts:
                sizes = [each.num_samples for each in part]
                assert max(sizes) - min(sizes) <= 1
                for each in part:
                    assert (
                        1 <= len(each.batch) == max(each.num_samples, 1) <= division["micro_batch"]
                    )
                    assert set(each.batch) <= set(group)  # an idle one is of the group, too
                    assert order[each.offset] == each.batch[0]
        assert seen == order[:kept]
        assert readers[0][(epoch + 1) * num_steps - 1][0].next == Position(epoch + 1)


@quickly
@given(divisions, st.integers(0, 12))
def test_a_resumed_run_continues_the_same(division: dict[str, Any], step: int) -> None:
    if division["drop_last"] and division["num_samples"] < division["global_batch"]:
        return
    for loader in loaders(division):
        whole = read(loader, Position(), step + 5)
        stored = json.loads(json.dumps(position_to_json(whole[step][0].position)))
        resumed = read(loader, position_from_json(stored), 5)
        assert [part for _, part in resumed] == [part for _, part in whole[step:]]
        assert [group.next for group, _ in resumed] == [group.next for group, _ in whole[step:]]
        assert whole[step][0].next == whole[step + 1][0].position


@quickly
@given(divisions, st.integers(1, 5), st.integers(1, 8))
def test_groups_do_not_depend_on_readers_or_accumulation(
    division: dict[str, Any], num_readers: int, micro_batch: int
) -> None:
    division["drop_last"] = False

    def groups(division: dict[str, Any]) -> list[list[int]]:
        readers = [read(loader, Position(1, 3), 6) for loader in loaders(division)]
        return [joined(part for _, part in step) for step in zip(*readers, strict=True)]

    division["num_samples"] += 3
    changed = {**division, "num_readers": num_readers, "micro_batch": micro_batch}
    assert groups(division) == groups(changed)


def test_full_groups_are_all_divided_alike() -> None:
    loader = Loader(Squares(100), global_batch=22, micro_batch=4, num_readers=3, reader_index=1)
    shapes = [[each.num_samples for each in part] for _, part in read(loader, Position(), 9)]
    assert shapes == 4 * [[4, 3]] + [[4]] + 4 * [[4, 3]]


def test_a_custom_order_says_how_long_an_epoch_is() -> None:
    def last_samples_twice(num_samples: int, seed: int, epoch: int) -> Order:
        return [num_samples - 1] * 2 + [num_samples - 2] * 2

    loader = Loader(
        Squares(9), global_batch=3, micro_batch=3, collate=as_list, order=last_samples_twice
    )
    assert loader.steps_per_epoch == 2
    assert [samples(part) for _, part in read(loader, Position(), 3)] == [[8, 8, 7], [7], [8, 8, 7]]


def test_an_order_is_read_in_few_pieces() -> None:
    reads: list[slice] = []

    class Recorded:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, part: slice, /) -> range:
            reads.append(part)
            return range(10**9)[part]

    loader = Loader(
        Squares(10**9), global_batch=8, micro_batch=4, order=lambda *_: Recorded(), collate=as_list
    )
    read(loader, Position(0, 800_000_000), 100)
    assert [(part.start, part.stop) for part in reads] == [(800_000_000, 800_004_096)]


def test_without_workers_nothing_is_fetched_ahead() -> None:
    fetched: list[int] = []

    class Recorded(Squares):
        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    loader = Loader(Recorded(20), global_batch=6, micro_batch=3, order=sequential)
    groups = loader.groups(Position(), 3)
    microbatches = next(groups).microbatches
    assert fetched == []
    next(microbatches)
    assert fetched == [0, 1, 2]
    with pytest.raises(RuntimeError, match="take all microbatches"):
        next(groups)


def test_getitems_is_used_when_there() -> None:
    class Many(Squares):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"{index} of {indices}" for index in indices]

    loader = Loader(Many(4), global_batch=2, micro_batch=2, order=sequential, collate=as_list)
    (_, part), *_ = read(loader, Position(), 1)
    assert samples(part) == ["0 of [0, 1]", "1 of [0, 1]"]


# --- random data ------------------------------------------------------------------------------


def augmented(start: Position, num_steps: int, **options: Any) -> list[list[Any]]:
    options = {"micro_batch": 3, "num_readers": 1, **options}
    readers = [
        read(
            Loader(Augmented(30), global_batch=8, collate=as_list, reader_index=index, **options),
            start,
            num_steps,
        )
        for index in range(options["num_readers"])
    ]
    return [joined(part for _, part in step) for step in zip(*readers, strict=True)]


def test_isolated_samples_depend_on_nothing_but_their_place() -> None:
    whole = augmented(Position(), 8, isolate_random=True)
    assert len({sample[1:] for step in whole for sample in step}) == sum(map(len, whole))
    start = Position(1, 8)
    for options in ({}, {"micro_batch": 5}, {"num_readers": 3}, {"workers": 2}, {"workers": 1}):
        random.random(), torch.rand(1), numpy.random.rand()
        assert augmented(start, 3, isolate_random=True, **options) == whole[5:8]


def test_workers_isolate_by_default() -> None:
    assert augmented(Position(), 3, workers=1) == augmented(Position(), 3, isolate_random=True)


def test_workers_without_isolation_are_exact_for_one_division() -> None:
    whole = augmented(Position(), 5, workers=1, isolate_random=False)
    assert augmented(Position(0, 16), 3, workers=2, isolate_random=False) == whole[2:]


def mask(samples: list[Sample]) -> list[Any]:
    return [*samples, random.random(), float(torch.rand(())), float(numpy.random.rand())]


def test_random_numbers_of_collate_are_isolated_too() -> None:
    def batches(**options: Any) -> list[Any]:
        loader = Loader(Augmented(9), global_batch=4, micro_batch=2, collate=mask, **options)
        return [each.batch for _, part in read(loader, Position(), 4) for each in part]

    assert batches(isolate_random=True) == batches(workers=2)


@pytest.mark.parametrize("options", [{"isolate_random": True}, {"workers": 1}])
def test_isolation_leaves_the_generators_alone(options: dict[str, Any]) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(torch.rand(())), float(numpy.random.randn())

    def seed() -> None:
        random.seed(1), torch.manual_seed(1), numpy.random.seed(1)
        numpy.random.randn()  # leaves the second of a pair behind

    seed()
    expected = draw()
    seed()
    augmented(Position(), 3, **options)
    assert draw() == expected


def test_without_isolation_the_process_s_generators_are_used() -> None:
    random.seed(5)
    expected = [random.random() for _ in range(8)]
    random.seed(5)
    (step,) = augmented(Position(), 1)
    assert [sample[1] for sample in step] == expected


# --- workers ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    assert not left


def worker_pid(samples: list[int]) -> int:
    return os.getpid()


@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_workers_live_through_all_epochs(start_method: str) -> None:
    loader = Loader(
        Squares(6),
        global_batch=4,
        micro_batch=2,
        collate=worker_pid,
        workers=2,
        start_method=start_method,
    )
    pids = {each.batch for _, part in read(loader, Position(), 12) for each in part}
    assert len(pids - {os.getpid()}) == len(pids) == 2


def test_workers_send_tensors_whatever_the_length_of_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    loader = Loader(Squares(4), global_batch=4, micro_batch=2, collate=torch.tensor, workers=1)
    sums = [int(each.batch.sum()) for _, part in read(loader, Position(), 1) for each in part]
    assert sum(sums) == 6


def test_closing_early_ends_the_workers() -> None:
    loader = Loader(Squares(1000), global_batch=4, micro_batch=2, workers=2)
    groups = loader.groups(Position(), 100)
    next(next(groups).microbatches)
    assert len(multiprocessing.active_children()) >= 2
    groups.close()
    assert not multiprocessing.active_children()


def test_dropping_the_iterator_ends_the_workers() -> None:
    loader = Loader(Squares(1000), global_batch=4, micro_batch=2, workers=2)
    before = set(multiprocessing.active_children())
    groups = loader.groups(Position(), 100)
    next(next(groups).microbatches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    del groups
    gc.collect()
    assert not workers & set(multiprocessing.active_children())


def test_an_exception_in_a_worker_arrives_with_its_traceback() -> None:
    loader = Loader(Broken(12), global_batch=4, micro_batch=2, order=sequential, workers=2)
    with pytest.raises(WorkerFailed) as caught:
        read(loader, Position(), 3)
    message = str(caught.value)
    assert "samples [4, 5] (from offset 4 of epoch 0)" in message
    assert 'raise KeyError("no such picture")' in message


def test_an_exception_that_cannot_be_pickled_arrives() -> None:
    loader = Loader(BrokenOddly(12), global_batch=4, micro_batch=2, workers=1)
    with pytest.raises(WorkerFailed, match="out of ink"):
        read(loader, Position(), 3)


def test_a_worker_that_is_killed_is_named() -> None:
    loader = Loader(Killed(12), global_batch=4, micro_batch=2, order=sequential, workers=2)
    expected = r"data worker \d+ \(exit code -9\), which was to fetch .*the samples \[4, 5\] .from"
    with pytest.raises(WorkerFailed, match=expected):
        read(loader, Position(), 3)


def test_a_worker_that_crashes_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    loader = Loader(Killed(12, signal.SIGSEGV), global_batch=4, micro_batch=2, workers=1)
    with pytest.raises(WorkerFailed, match=r"exit code -11"):
        read(loader, Position(), 3)
    printed = capfd.readouterr().err
    assert "Segmentation fault" in printed
    assert "in __getitem__" in printed.partition("Current thread")[2]


ORPHAN = """
import os, signal, time
from drivetrain.data.indexed import Loader
from drivetrain.kernel.batches import Position

def forked():
    parent = os.getppid()
    print(os.getpid(), flush=True)
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)

os.register_at_fork(after_in_child=forked)
loader = Loader(range(1000), global_batch=4, micro_batch=2, workers=1, start_method="fork")
groups = loader.groups(Position(), 100)
next(next(groups).microbatches)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_whose_process_is_gone_before_it_begins_ends() -> None:
    """Require that such a worker ends. Otherwise it would hold what it inherited, such as the lock
    of the run's folder.
    """
    program = [sys.executable, "-c", ORPHAN]
    killed = subprocess.run(program, stdout=subprocess.PIPE, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    workers = [Path(f"/proc/{int(line)}/stat") for line in killed.stdout.split()]
    deadline = time.monotonic() + 20
    while alive := [worker for worker in workers if worker.exists()]:
        assert time.monotonic() < deadline, f"{alive} live on"
        time.sleep(0.1)
    assert workers


@pytest.fixture(params=["first", "after another"])
def earlier_loader(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Run a first `DataLoader` in this process, which installs torch's signal handler."""
    handler = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    if request.param == "after another":
        list(DataLoader([0], num_workers=1))  # type: ignore[arg-type]
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("earlier_loader")
def test_the_death_of_a_worker_is_raised_where_the_data_is_asked_for() -> None:
    before = set(multiprocessing.active_children())
    loader = Loader(Squares(10_000), global_batch=2, micro_batch=2, workers=1)
    groups = loader.groups(Position(), 5000)
    list(next(groups).microbatches)
    (worker,) = set(multiprocessing.active_children()) - before
    os.kill(worker.pid or 0, signal.SIGKILL)
    # a signal handler that raises would do so here, before the worker is reaped
    multiprocessing.connection.wait([worker.sentinel])
    time.sleep(0.1)
    with pytest.raises(WorkerFailed, match=str(worker.pid)):
        deque(each for group in groups for each in group.microbatches)


class KilledAsItLooks(Squares):
    """Data whose worker is killed while it holds an event's lock, or at the latest at the next
    sample.
    """

    def __getitem__(self, index: int) -> int:
        def entered(condition: Any) -> None:
            condition._lock.acquire()
            os.kill(os.getpid(), signal.SIGKILL)

        if index == 4:
            multiprocessing.synchronize.Condition.__enter__ = entered  # type: ignore[method-assign]
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.timeout(60)
def test_a_worker_killed_as_it_looks_whether_it_shall_end_fails() -> None:
    data = KilledAsItLooks(12)
    loader = Loader(data, global_batch=1, micro_batch=1, order=sequential, workers=1)
    with pytest.raises(WorkerFailed, match=r"exit code -9.*samples \[5\]"):
        read(loader, Position(), 12)


class KilledAsItSends(Squares):
    """Data whose worker is killed after it has sent the first half of a microbatch."""

    def __getitem__(self, index: int) -> int:
        def first_half(connection: Any, message: bytes) -> None:
            os.write(connection.fileno(), message[: len(message) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        if index == 5:
            multiprocessing.connection.Connection._send = first_half  # type: ignore[attr-defined]
        return super().__getitem__(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_while_it_sends_a_microbatch_fails(workers: int) -> None:
    data = KilledAsItSends(12)
    loader = Loader(data, global_batch=1, micro_batch=1, order=sequential, workers=workers)
    with pytest.raises(WorkerFailed, match="exit code -9"):
        read(loader, Position(), 12)


# --- errors -----------------------------------------------------------------------------------


def test_an_exception_without_workers_is_the_cause() -> None:
    loader = Loader(Broken(12), global_batch=4, micro_batch=2, order=sequential)
    with pytest.raises(DataFailed, match=r"samples \[4, 5\].*no such picture") as caught:
        read(loader, Position(), 3)
    assert isinstance(caught.value.__cause__, KeyError)


class Leaves(Squares):
    """Data that ends the process that fetches it."""

    def __getitem__(self, index: int) -> int:
        if index == 4:
            sys.exit(0)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_calls_sys_exit_fails(workers: int) -> None:
    loader = Loader(Leaves(12), global_batch=4, micro_batch=2, order=sequential, workers=workers)
    with pytest.raises(DataFailed, match=r"samples \[4, 5\].*SystemExit: 0"):
        read(loader, Position(), 3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Squares(0), {}, DataError, "no samples"),
        (Stream(), {}, DataError, "Stream.*map-style"),
        (iter([1]), {}, DataError, "map-style"),
        (Squares(3), {"drop_last": True}, DataError, "3 samples.*4"),
        (Squares(9), {"num_readers": 5}, SettingError, "4 samples.*5 readers"),
        (Squares(9), {"num_readers": 2, "reader_index": 2}, SettingError, "reader_index is 2"),
        (Squares(9), {"micro_batch": 0}, SettingError, r"micro_batch \(0\)"),
        (Squares(9), {"order": lambda *_: []}, DataError, "order of epoch 0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_once(
    dataset: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Loader(dataset, **{"global_batch": 4, "micro_batch": 2, **options})


def test_a_position_past_the_end_is_refused() -> None:
    loader = Loader(Squares(9), global_batch=4, micro_batch=2)
    with pytest.raises(DataError, match="10 samples of epoch 1"):
        read(loader, Position(1, 10), 1)
    ((group, _),) = read(loader, Position(1, 9), 1)
    assert group.position == Position(2, 0)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"epoch": 1},
        {"epoch": -1, "samples": 0},
        {"epoch": 1, "samples": 0, "state": []},
        {"epoch": 1, "samples": 0, "more": 1},
    ],
)
def test_a_malformed_position_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="not a data position"):
        position_from_json(value)


# --- evaluation -------------------------------------------------------------------------------


def eval_batches(dataset: Any, **options: Any) -> list[Microbatch]:
    groups = eval_groups(dataset, collate=as_list, **options)
    return [each for group in groups for each in timeless(group.microbatches)]


@quickly
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5))
def test_evaluation_sees_each_sample_once(
    num_samples: int, micro_batch: int, num_readers: int
) -> None:
    readers = [
        eval_batches(
            Squares(num_samples),
            micro_batch=micro_batch,
            num_readers=num_readers,
            reader_index=index,
        )
        for index in range(num_readers)
    ]
    gathered: list[int] = []
    for batches in zip(*readers, strict=True):
        assert batches[0].offset == len(gathered)
        gathered += samples(list(batches))
        assert all(len(each.batch) <= micro_batch for each in batches)
    assert gathered == list(range(num_samples))


def test_evaluation_with_workers_is_the_same() -> None:
    options: dict[str, Any] = {"micro_batch": 4, "num_readers": 2, "reader_index": 1}
    with_workers = eval_batches(Squares(21), workers=2, **options)
    assert with_workers == eval_batches(Squares(21), **options)
    assert get_worker_info() is None
