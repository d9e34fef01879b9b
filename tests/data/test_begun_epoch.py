"""An epoch that a run has begun is finished in its order, even if the data have changed."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset
from trainer.problems import build, everything

from drivetrain import (
    Batches,
    CheckpointSettings,
    EvaluateSettings,
    Recipe,
    ScheduleSettings,
    Settings,
)
from drivetrain.checkpoint import MANIFEST, read_manifest
from drivetrain.data.indexed import Loader
from drivetrain.data.order import ByLength, OrderFunction, sequential, shuffled
from drivetrain.kernel.batches import Position
from drivetrain.kernel.errors import CheckpointDamaged, DataError
from drivetrain.kernel.events import Event, Logged, Resumed, RunStarted
from drivetrain.trainer.fit import fit

quickly = settings(deadline=None, max_examples=150)


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


def order_of(kind: str, num_samples: int, salt: int, batch: int) -> OrderFunction:
    if kind != "by length":
        return sequential if kind == "sequential" else shuffled
    generator = torch.Generator().manual_seed(salt)
    lengths = torch.randint(1, 9, (num_samples,), generator=generator).tolist()
    return ByLength(lengths, batch, 3 * batch)


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw runs of the same training, each with its own data, batch, seed, readers and number of
    steps.
    """
    drop_last = draw(st.booleans())
    kind = st.sampled_from(["shuffled", "sequential", "by length"])
    one = st.fixed_dictionaries(
        {
            "num_samples": st.integers(8, 60),
            "global_batch": st.integers(4, 8),
            "num_readers": st.integers(1, 3),
            "micro_batch": st.integers(1, 4),
            "seed": st.integers(0, 2),
            "kind": kind,
            "steps": st.integers(0, 4),
            "drop_last": st.just(drop_last),
            "warmup": st.none() | st.integers(1, 6),
        }
    )
    return draw(st.lists(one, min_size=1, max_size=5))


def loaders_of(run: dict[str, Any], number: int) -> list[Loader]:
    order = order_of(run["kind"], run["num_samples"], number, run["global_batch"])
    names = ("global_batch", "num_readers", "micro_batch", "seed", "drop_last")
    warmup = {}
    if run["warmup"] and run["global_batch"] in (6, 8):
        start = run["global_batch"] // 2
        warmup = {"batch_warmup": run["warmup"], "batch_warmup_from": start}
    return [
        Loader(
            Numbers(run["num_samples"]),
            **{name: run[name] for name in names},
            **warmup,
            reader_index=index,
            order=order,
            collate=list,
        )
        for index in range(run["num_readers"])
    ]


def read(loaders: list[Loader], start: Position, steps: int) -> list[tuple[Position, list[int]]]:
    """Return the end and the samples of each step, over all readers."""
    parts = [
        [(group, list(group.microbatches)) for group in loader.groups(start, steps)]
        for loader in loaders
    ]
    return [
        (
            turn[0][0].next,
            [
                sample
                for _, own in turn
                for each in own
                for sample in each.batch[: each.num_samples]
            ],
        )
        for turn in zip(*parts, strict=True)
    ]


@quickly
@given(runs())
def test_an_epoch_is_finished_as_it_was_begun(all_runs: list[dict[str, Any]]) -> None:
    position, begun, seen, fewest = Position(), {}, list[int](), 60
    for number, run in enumerate(all_runs):
        loaders = loaders_of(run, number)
        for loader in loaders:
            loader.resume(position, json.loads(json.dumps(begun)))
        fewest = min(fewest, run["num_samples"])
        rest = read(loaders, position, loaders[0].steps_left(position))
        assert [end.epoch for end, _ in rest] == [0] * (len(rest) - 1) + [1] * bool(rest)
        if run is all_runs[-1]:
            break
        taken = rest[: min(run["steps"], len(rest) - 1)] if rest else []
        if not taken and not position.samples:
            fewest = 60  # not begun yet
        if taken:
            position = taken[-1][0]
        seen += [sample for _, samples in taken for sample in samples]
        begun = loaders[0].begun(position)
        assert all(loader.begun(position) == begun for loader in loaders)
    begun_with = loaders[0].length_at(position)
    seen += [sample for _, samples in rest for sample in samples]
    assert len(seen) == len(set(seen))
    assert max(seen, default=0) < begun_with
    missed = set(range(min(fewest, begun_with))) - set(seen)
    assert len(missed) < (run["global_batch"] if run["drop_last"] else 1)
    # from the next epoch on, the order is the data's own
    steps = read(loaders, Position(1), 30)
    later = [
        sample
        for end, samples in steps
        if end.epoch == 1 or end == Position(2)
        for sample in samples
    ]
    order = order_of(run["kind"], run["num_samples"], number, run["global_batch"])
    expected = torch.as_tensor(order(run["num_samples"], run["seed"], 1)[:]).tolist()
    assert later == expected[: len(later)]
    assert len(expected) - len(later) < (run["global_batch"] if run["drop_last"] else 1)


@quickly
@given(runs(), st.integers(1, 5))
def test_what_was_resumed_resumes_the_same(all_runs: list[dict[str, Any]], steps: int) -> None:
    first, second = all_runs[0], all_runs[-1]
    position = read(loaders_of(first, 0), Position(), 1)[0][0]
    resumed = loaders_of(second, 1)
    for loader in resumed:
        loader.resume(position, loaders_of(first, 0)[0].begun(position))
    whole = read(resumed, position, steps + 3)
    at = whole[steps - 1][0]
    again = loaders_of({**second, "num_readers": first["num_readers"]}, 1)
    for loader in again:
        loader.resume(at, resumed[0].begun(at))
    assert read(again, at, 3) == whole[steps:]


def test_a_longer_set_is_read_to_its_old_end_at_once() -> None:
    started = time.perf_counter()
    before = Loader(Numbers(10**9), global_batch=8, micro_batch=8, collate=list)
    position = Position(0, 8 * 10**7)
    after = Loader(Numbers(2 * 10**9), global_batch=8, micro_batch=8, collate=list)
    after.resume(position, before.begun(position))
    assert read([after], position, 5) == read([before], position, 5)
    assert after.steps_left(position) == before.steps_left(position) == 115 * 10**6
    assert time.perf_counter() - started < 20


def test_data_of_which_hardly_any_are_left_are_other_data() -> None:
    loader = Loader(Numbers(5), global_batch=2, micro_batch=2)
    begun = Loader(Numbers(5001), global_batch=2, micro_batch=2).begun(Position(0, 4))
    with pytest.raises(DataError, match=r"with 5001 samples, and there are 5: .*other data"):
        loader.resume(Position(0, 4), begun)


# --- runs -------------------------------------------------------------------------------------


class Watched(TensorDataset):
    """Data that records the samples that were trained on."""

    def __init__(self, length: int) -> None:
        inputs = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
        super().__init__(inputs)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.asked.append(index)
        sample: tuple[Tensor, ...] = super().__getitem__(index)
        return sample


def loss(module: torch.nn.Module, batch: list[Tensor]) -> Tensor:
    return (module(batch[0]) - batch[0].sum(1, keepdim=True)).square().sum()


THREE_EPOCHS = Settings(
    epochs=3,
    global_batch=8,
    log_every=1,
    schedule=ScheduleSettings(name="linear"),
    checkpoint=CheckpointSettings(every=1, keep_last=100),
    evaluate=EvaluateSettings(sanity_check=False),  # which would read samples, too
)


def go(
    length: int, out: Path, resume: Path | None = None, **changes: Any
) -> tuple[Any, Watched, list[Event]]:
    data, events = Watched(length), list[Event]()
    recipe = Recipe(model=build, loss=loss, train_data=changes.pop("data", data))
    settings = dataclasses.replace(THREE_EPOCHS, **changes)
    result = fit(recipe, settings, backend="cpu", out=out, resume=resume, observers=[events.append])
    return result, data, events


def only(kind: type, events: list[Event]) -> Any:
    return next(event for event in events if isinstance(event, kind))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a run's checkpoints, and the samples that it trained on, in order. 53 samples are 7
    steps an epoch.
    """
    folder = tmp_path_factory.mktemp("first")
    _, data, _ = go(53, folder)
    return folder / "checkpoints", data.asked


@pytest.mark.parametrize(
    ("length", "left", "per_epoch", "message"),
    [
        (80, 4, 10, "; the new ones come from epoch 2 on"),
        (40, None, 5, ", without those that are gone"),
    ],
)
def test_a_run_goes_on_with_data_of_another_length(
    tmp_path: Path,
    first_run: tuple[Path, list[int]],
    length: int,
    left: int | None,
    per_epoch: int,
    message: str,
) -> None:
    checkpoints, before = first_run
    seen = before[53 : 53 + 24]  # of epoch 1, in steps 8 to 10
    unseen = [index for index in before[53 + 24 : 106] if index < length]
    left = left or math.ceil(len(unseen) / 8)
    result, data, events = go(length, tmp_path, checkpoints / "checkpoint-000010")
    started = only(RunStarted, events)
    assert started.total_steps == result.step == 10 + left + per_epoch
    assert data.asked[: len(unseen)] == unseen
    assert not set(seen) & set(unseen)
    assert sorted(data.asked[len(unseen) :]) == list(range(length))
    notes = only(Resumed, events).notes
    expected = "epoch 1 is finished in the order of the 53 samples that it was begun with" + message
    assert notes == (f"the length of train_data was 53, is {length}: {expected}",)
    logged = [event for event in events if isinstance(event, Logged)]
    assert logged[0].epoch == pytest.approx(1 + data_offset(tmp_path, 11) / 53)
    assert logged[left - 1].epoch == 2 and logged[-1].epoch == 3
    rates = [event.learning_rate for event in logged]
    ends = [1 - step / result.step for step in range(10, result.step)]
    assert rates == pytest.approx([1e-3 * (0.1 + 0.9 * end) for end in ends])


def data_offset(out: Path, step: int) -> int:
    folder = out / "checkpoints" / f"checkpoint-{step:06}"
    offset: int = read_manifest(folder).state["position"]["samples"]
    return offset


@pytest.mark.parametrize("length", [80, 40])
def test_it_resumes_bit_for_bit_in_that_epoch_too(
    tmp_path: Path, first_run: tuple[Path, list[int]], length: int
) -> None:
    checkpoints, _ = first_run
    whole, _, _ = go(length, tmp_path / "whole", checkpoints / "checkpoint-000009")
    made = tmp_path / "whole/checkpoints"
    for step in (10, 14):  # in the epoch that was begun with 53, and in the next one
        again, _, events = go(length, tmp_path / f"{step}", made / f"checkpoint-{step:06}")
        assert only(RunStarted, events).total_steps == again.step == whole.step
        assert not only(Resumed, events).notes
        name = f"checkpoint-{whole.step:06}"
        left, right = everything(made / name), everything(tmp_path / f"{step}/checkpoints" / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[each], right[each]) for each in left)


def test_another_batch_leaves_the_epochs_whole(
    tmp_path: Path, first_run: tuple[Path, list[int]]
) -> None:
    checkpoints, before = first_run
    result, data, _ = go(53, tmp_path, checkpoints / "checkpoint-000010", global_batch=16)
    assert data.asked[:29] == before[53 + 24 : 106]
    assert result.step == 10 + 2 + 4
    assert sorted(data.asked[29:]) == list(range(53))


def test_part_of_an_epoch_ends_there(tmp_path: Path, first_run: tuple[Path, list[int]]) -> None:
    checkpoints, _ = first_run
    result, _, _ = go(80, tmp_path / "a", checkpoints / "checkpoint-000010", epochs=2.5)
    assert result.step == 10 + 4 + 5
    result, _, _ = go(80, tmp_path / "b", checkpoints / "checkpoint-000010", epochs=1.5)
    assert result.step == 7 + 4
    result, _, _ = go(80, tmp_path / "c", checkpoints / "checkpoint-000010", epochs=1)
    assert result.step == 10


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Return a copy of the checkpoint with another state."""
    shutil.copytree(checkpoint, folder)
    stored = read_manifest(folder)
    change(stored.state)
    (folder / MANIFEST).write_bytes(stored.to_bytes())
    return folder


def test_a_checkpoint_that_does_not_say_the_length_goes_on_as_before(
    tmp_path: Path, first_run: tuple[Path, list[int]]
) -> None:
    def forget(state: dict[str, Any]) -> None:
        del state["begun"], state["planned"]

    folder = changed(first_run[0] / "checkpoint-000010", tmp_path / "old", forget)
    result, data, events = go(80, tmp_path / "out", folder)
    assert result.step == only(RunStarted, events).total_steps == 30
    expected = torch.as_tensor(shuffled(80, 0, 1)[24:]).tolist()
    assert data.asked[: len(expected)] == expected


def test_data_in_an_order_of_their_own_resume_there(tmp_path: Path) -> None:
    def batches(length: int) -> Batches:
        return Batches(torch.utils.data.DataLoader(Watched(length), batch_size=8))

    go(53, tmp_path / "a", data=batches(53))
    checkpoint = tmp_path / "a/checkpoints/checkpoint-000010"
    result, _, events = go(53, tmp_path / "b", checkpoint, data=batches(80))
    assert result.step == 10 + 7 + 10
    (note,) = only(Resumed, events).notes
    assert note.startswith(
        "the length of train_data was 7, is 10: epoch 1 continues after the first 3"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("planned", {"total": "many"}),
        ("planned", []),
        ("begun", {"length": 53}),
        ("begun", [1]),
        ("begun", {"length": 53, "seed": 0, "shuffled": True, "rest": [1, 1]}),
        ("begun", {"length": 53, "seed": 0, "shuffled": True, "rest": [54]}),
        ("begun", {"length": 23, "seed": 0, "shuffled": True, "rest": []}),
        ("begun", {"length": True, "seed": 0, "shuffled": True, "rest": []}),
    ],
)
def test_what_is_malformed_is_named(
    tmp_path: Path, first_run: tuple[Path, list[int]], key: str, value: Any
) -> None:
    checkpoint = first_run[0] / "checkpoint-000010"
    folder = changed(checkpoint, tmp_path / "old", lambda state: state.update({key: value}))
    with pytest.raises(CheckpointDamaged, match=r"old.*(planned steps|order of samples)"):
        go(80, tmp_path / "out", folder)


def test_a_changed_seed_waits_for_the_next_epoch(
    tmp_path: Path, first_run: tuple[Path, list[int]]
) -> None:
    checkpoints, before = first_run
    _, data, _ = go(53, tmp_path, checkpoints / "checkpoint-000010", seed=5)
    assert data.asked[:29] == before[53 + 24 : 106]
    assert data.asked[29:] == torch.as_tensor(shuffled(53, 5, 2)[:]).tolist()
