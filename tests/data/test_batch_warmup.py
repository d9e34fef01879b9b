"""A global batch that grows at the beginning of a run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import (
    Batches,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    Mix,
    OptimizerSettings,
    Recipe,
    ScheduleSettings,
    Settings,
)
from drivetrain.data.batch_sizes import BatchSizes
from drivetrain.data.open_dataset import by_sample
from drivetrain.data.order import sequential
from drivetrain.kernel.batches import Position
from drivetrain.kernel.errors import DataError, SettingError
from drivetrain.kernel.events import Evaluated, Logged
from drivetrain.trainer.fit import fit
from drivetrain.trainer.spikes import SkipGroups

quickly = settings(max_examples=150, deadline=None)


def size_of(step: int, start: int, global_batch: int, warmup: int) -> int:
    """Return the size of a step's batch, from the number of full groups before it."""
    smaller = global_batch // start - 1
    return start * (1 + step * smaller // warmup) if step < warmup else global_batch


warmups = st.tuples(st.integers(3, 5), st.integers(2, 6), st.integers(1, 9))
"""The smallest size, the number of times that it is contained in the largest, and the warm-up's
steps.
"""


@quickly
@given(warmups)
def test_each_multiple_has_nearly_as_many_steps(warmup: tuple[int, int, int]) -> None:
    start, times, steps = warmup
    sizes, samples = BatchSizes(start * times, steps, start), 0
    for step in range(steps + 3):
        assert sizes.at(samples) == size_of(step, start, start * times, steps)
        samples += sizes.at(samples)
    lasts = [b.step - a.step for a, b in zip(sizes.stages, sizes.stages[1:], strict=False)]
    assert max(lasts) - min(lasts) <= 1


class Front:
    """A stream with a length: the numbers from 0 on."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def sources(stream: bool, num_samples: int, readers: int, **options: Any) -> list[Any]:
    data = Front(num_samples) if stream else range(num_samples)
    options |= {"order": sequential, "micro_batch": 2, "collate": list, "num_readers": readers}
    return [by_sample(data, reader_index=index, **options) for index in range(readers)]


Steps = list[tuple[Position, list[int], Position]]


def read(readers: list[Any], start: Position, steps: int) -> Steps:
    """Return, for each step, its position, its samples over all readers, and the next position."""
    parts = [
        [(group, list(group.microbatches)) for group in each.groups(start, steps)]
        for each in readers
    ]
    return [
        (
            turn[0][0].position,
            [i for _, own in turn for each in own for i in each.batch[: each.num_samples]],
            turn[0][0].next,
        )
        for turn in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize("stream", [False, True])
@quickly
@given(warmups, st.integers(1, 70), st.integers(1, 3), st.booleans(), st.floats(0.1, 3.0))
def test_any_number_of_readers_sees_the_same_steps(
    stream: bool,
    warmup: tuple[int, int, int],
    num_samples: int,
    readers: int,
    drop_last: bool,
    epochs: float,
) -> None:
    """Require each sample once an epoch, from every step on. The total number of steps is known in
    advance.
    """
    start, times, steps = warmup
    largest = start * times
    if drop_last and num_samples < largest:
        return
    options = {
        "global_batch": largest,
        "batch_warmup": steps,
        "batch_warmup_from": start,
        "drop_last": drop_last,
    }
    several = sources(stream, num_samples, readers, **options)
    one = sources(stream, num_samples, 1, **options)
    expected = []
    for epoch in range(math.ceil(epochs)):
        at = 0
        while at < num_samples:
            size = one[0].sizes.at(epoch * num_samples + at)
            ids = list(range(at, min(at + size, num_samples)))
            if len(ids) == size or not drop_last:
                expected.append((epoch, ids))
            at += size
    found = read(several, Position(), len(expected))
    assert [(position.epoch, ids) for position, ids, _ in found] == expected
    for number in range(0, len(found), 3):
        position = found[number][0]
        assert read(one, position, len(found) - number) == found[number:]
        left = sum(at.epoch == position.epoch for at, _, _ in found[number:])
        assert one[0].steps_left(position) == left
    last = math.ceil(epochs) - 1
    assert one[0].steps_in(0, last + 1) == len(expected)
    assert one[0].steps_in(1, last + 1) == sum(epoch > 0 for epoch, _ in expected)
    full = num_samples // largest if drop_last else -(-num_samples // largest)
    limit = math.ceil((epochs - last) * full) * largest
    in_part = sum(epoch == last and ids[0] < limit for epoch, ids in expected)
    assert one[0].steps_in(last, epochs) == in_part


class Stateful(Front):
    """A stream that resumes from its state; `read` counts the samples that it returned."""

    at = read = 0

    def __iter__(self) -> Iterator[int]:
        start, self.at = self.at, 0
        for number in range(start, self.size):
            self.at = number + 1
            self.read += 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_a_stream_is_that_where_a_group_ends(drop_last: bool, workers: int) -> None:
    options: dict[str, Any] = {"global_batch": 12, "batch_warmup": 5, "batch_warmup_from": 4}
    options |= {"micro_batch": 4, "collate": list, "drop_last": drop_last, "workers": workers}
    whole = read([by_sample(Stateful(45), **options)], Position(), 9)
    sizes = [4, 4, 4, 8, 8, 12, 12, 12, 12] if drop_last else [4, 4, 4, 8, 8, 12, 5, 12, 12]
    assert [len(ids) for _, ids, _ in whole] == sizes
    for number in range(1, 9, 2 if workers else 1):
        stream = Stateful(45)
        position = whole[number][0]
        assert (position.state is None) == (position.samples == 0)
        assert read([by_sample(stream, **options)], position, 1) == whole[number : number + 1]
        assert workers or stream.read <= 12 + 12  # what it trained on, and looked at


def test_a_mixture_draws_the_same_samples() -> None:
    options: dict[str, Any] = {"global_batch": 12, "micro_batch": 4, "collate": list, "seed": 3}
    growing = {**options, "batch_warmup": 9, "batch_warmup_from": 4}

    def drawn(start: Position, steps: int, **options: Any) -> Steps:
        mixture = Mix({"a": (list(range(20)), 2.0), "b": (list(range(100, 110)), 1.0)})
        return read([by_sample(mixture, **options)], start, steps)

    whole = drawn(Position(), 12, **growing)
    assert [len(ids) for _, ids, _ in whole] == [4, 4, 4, 4, 4, 8, 2, 8, 8, 8, 6, 12]
    constant = [i for _, ids, _ in drawn(Position(), 8, **options) for i in ids]
    assert [i for _, ids, _ in whole for i in ids] == constant[:72]
    for number in range(1, 12):
        assert drawn(whole[number][0], 12 - number, **growing) == whole[number:]


def test_what_is_left_out_changes_no_other_group() -> None:
    """Leave groups out after a spike, or resume after them. The other groups must not change."""
    (source,) = sources(False, 100, 1, global_batch=16, batch_warmup=6, batch_warmup_from=4)
    whole = read([source], Position(), 9)
    skipping = SkipGroups(source, {(0, whole[number][0].samples) for number in (1, 5)})
    kept = [step for number, step in enumerate(whole) if number not in (1, 5)]
    assert read([skipping], Position(), 7) == kept
    assert read([skipping], kept[2][2], 4) == kept[3:]


# --- whole runs --------------------------------------------------------------------------------

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))
Y = X.square().sum(1, keepdim=True)
SIZES = [4, 4, 4, 8, 8, 12, 12, 12, 12, 4]
"""Sizes of the batches of `SETTINGS`. The second epoch ends with the remaining samples."""
SETTINGS = Settings(
    epochs=2.0,
    global_batch=12,
    micro_batch=3,
    log_every=1,
    max_grad_norm=None,
    optimizer=OptimizerSettings(name="torch.optim.SGD", lr=0.05),
    schedule=ScheduleSettings("linear"),
    data=DataSettings(shuffle=False, batch_warmup=5, batch_warmup_from=4),
    evaluate=EvaluateSettings(every_epochs=0.5),
)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


DATA = torch.utils.data.TensorDataset(X, Y)
RECIPE = Recipe(model, loss, DATA, eval_data={"held_out": DATA})


def trained(out: Path | None = None, recipe: Recipe = RECIPE, **how: Any) -> tuple[Any, list[Any]]:
    """Return the final weights, and all events."""
    events: list[Any] = []
    keep = {"every": 1, "keep_last": 20} if out else {}
    chosen = dataclasses.replace(SETTINGS, checkpoint=CheckpointSettings(**keep))
    result = fit(
        recipe,
        chosen,
        backend="cpu",
        out=out,
        observers=[events.append],
        finish=lambda module: {n: p.detach().clone() for n, p in module.named_parameters()},
        **how,
    )
    return result.finish, events


def test_each_loss_is_divided_by_the_samples_of_its_step(tmp_path: Path) -> None:
    """Compare with a plain loop. Learning rates, epochs and evaluations follow the actual steps."""
    weights, events = trained()
    torch.manual_seed(0)
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    logged = [event for event in events if isinstance(event, Logged)]
    first = 0
    for number, size in enumerate(SIZES):
        rate = 0.05 * (1 - 0.9 * number / len(SIZES))
        optimizer.param_groups[0]["lr"] = rate
        mean = (plain(X[first : first + size]) - Y[first : first + size]).square().mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        line = logged[number]
        assert (line.samples, line.items) == (sum(SIZES[: number + 1]),) * 2
        assert math.isclose(line.learning_rate, rate)
        assert math.isclose(line.loss, mean.item(), rel_tol=1e-6)
        first = (first + size) % 40
    assert len(logged) == len(SIZES)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-6)
    steps = [event.step for event in events if isinstance(event, Evaluated)]
    assert steps == [4, 6, 8, 10]  # where 20, 40, 60 and 80 samples were passed


def test_a_run_that_is_killed_at_any_step_resumes_with_its_bits(tmp_path: Path) -> None:
    weights, events = trained(tmp_path / "whole")
    lines = [(e.step, e.loss, e.samples, e.epoch) for e in events if isinstance(e, Logged)]
    for step in range(1, len(SIZES)):
        source = tmp_path / "whole" / "checkpoints" / f"checkpoint-{step:06}"
        resumed, later = trained(tmp_path / str(step), resume=source)
        reported = [(e.step, e.loss, e.samples, e.epoch) for e in later if isinstance(e, Logged)]
        assert reported == lines[step:]
        assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_memory_that_runs_out_when_the_batch_has_grown() -> None:
    """Let the largest batch run out of memory. It is divided into smaller microbatches, and the
    losses stay.
    """

    def fitting(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("room for 8 rows")
        return loss(module, batch)

    recipe = dataclasses.replace(RECIPE, loss=fitting, eval_data={})
    events: list[Any] = []
    whole = dataclasses.replace(SETTINGS, micro_batch=None)
    fit(recipe, whole, backend="cpu", observers=[events.append])
    found = [event.loss for event in events if isinstance(event, Logged)]
    expected = [event.loss for event in trained()[1] if isinstance(event, Logged)]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_counts_the_steps_of_another_warmup(tmp_path: Path) -> None:
    """Resume with other settings: the rest of the begun epoch is divided into batches of the new
    sizes.
    """
    trained(tmp_path / "whole")
    source = tmp_path / "whole" / "checkpoints" / "checkpoint-000002"
    constant = dataclasses.replace(SETTINGS, data=DataSettings(shuffle=False))
    result = fit(RECIPE, constant, backend="cpu", resume=source)
    assert result.step == 2 + 3 + 4


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("set_to", "reported"),
    [
        (
            {"batch_warmup": 5},
            "data.batch_warmup is 5 and data.batch_warmup_from is None: set both",
        ),
        ({"batch_warmup_from": 4}, "set both"),
        ({"batch_warmup": 5, "batch_warmup_from": 5}, "5, and global_batch is 12: the first"),
        ({"batch_warmup": 5, "batch_warmup_from": 12}, "12, and global_batch is 12: the first"),
        ({"batch_warmup": 0, "batch_warmup_from": 4}, "data.batch_warmup is 0"),
        ({"batch_warmup": 10**7, "batch_warmup_from": 4}, "at most 1000000"),
    ],
)
def test_settings_that_do_not_fit_are_refused(set_to: dict[str, Any], reported: str) -> None:
    with pytest.raises(SettingError, match=re.escape(reported)):
        Settings(global_batch=12, data=DataSettings(**set_to))


def test_more_readers_than_samples_are_refused() -> None:
    with pytest.raises(SettingError, match=r"data\.batch_warmup_from is 4, .* 5 readers: raise it"):
        sources(False, 40, 5, global_batch=12, batch_warmup=5, batch_warmup_from=4)


def test_ready_batches_are_refused() -> None:
    ready = Batches(torch.utils.data.DataLoader(DATA, batch_size=4))
    with pytest.raises(SettingError, match=r"data\.batch_warmup is 5, and ready batches"):
        trained(recipe=dataclasses.replace(RECIPE, train_data=ready, eval_data={}))


def test_a_stream_without_a_length_must_be_long_enough() -> None:
    """Require an error: a run that resumes in a later epoch does not know the number of samples in
    earlier ones.
    """

    def numbers() -> Iterator[int]:
        return iter(range(25))

    def steps(warmup: int, epochs: int | None) -> Steps:
        options: dict[str, Any] = {"global_batch": 12, "batch_warmup_from": 4, "micro_batch": 4}
        options |= {"collate": list, "num_epochs": epochs, "batch_warmup": warmup}
        return read([by_sample(numbers, **options)], Position(), 99)

    assert [len(ids) for _, ids, _ in steps(4, 2)] == [4, 4, 8, 8, 1, 12, 12, 1]
    assert [len(ids) for _, ids, _ in steps(9, 1)] == [4, 4, 4, 4, 4, 5]
    with pytest.raises(
        DataError, match=r"ended after 25 samples, and data\.batch_warmup=9 takes 52"
    ):
        steps(9, 2)
