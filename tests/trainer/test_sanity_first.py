"""A loss that is a mean ends a run before its first step also if samples can be read only once: the
first microbatch is split in two, and trained on afterwards as if nothing had been checked.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Batches, EvaluateSettings, Mix, Recipe, ScheduleSettings, Settings, fit
from drivetrain.data.halves import halve
from drivetrain.kernel.batches import Group, Microbatch, Position
from drivetrain.kernel.errors import RecipeError
from drivetrain.trainer.read_ahead import ReadAhead

UNCHECKED = EvaluateSettings(sanity_check=False)
SETTINGS = Settings(
    steps=4,
    global_batch=8,
    micro_batch=5,
    evaluate=EvaluateSettings(at_end=False),
    schedule=ScheduleSettings("constant"),
)


class Rows:
    """The numbers of a row are those of its index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def loader(**options: Any) -> Any:
    return DataLoader(Rows(), shuffle=True, **options)  # type: ignore[arg-type]


def rows() -> Iterator[Tensor]:
    return (Rows()[index] for index in range(40))


def endless() -> Iterator[Tensor]:
    while True:
        yield from rows()


ONCE: dict[str, Callable[[], Any]] = {
    "Batches": lambda: Batches([torch.stack([*rows()][at : at + 5]) for at in range(0, 40, 5)]),
    "loader": lambda: Batches(loader(batch_size=5)),
    "loader of samples": lambda: DataLoader(Rows(), batch_size=None),  # type: ignore[arg-type]
    "generator": rows,
    "Mix": lambda: Mix({"a": (Rows(), 0.5), "b": (Rows(), 0.5)}),
    "Mix of streams": lambda: Mix({"a": (Rows(), 0.5), "b": (endless, 0.5)}),
}


class Net(nn.Module):
    """A network with a state of its own, and random numbers. It refuses batches of at most
    `refused` rows."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.refused = refused
        self.seen: list[tuple[bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, len(x)))
        if len(x) <= self.refused:
            raise RuntimeError(f"a batch of {len(x)}")
        return self.layers(x)  # type: ignore[no-any-return]


def summed(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch) - torch.rand(())).square().sum()


def distance(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch) - 3).square().sum()


def mean(module: nn.Module, batch: Any) -> Tensor:
    return distance(module, batch) / len(batch)


def train(
    data: Any,
    loss: Any = summed,
    settings: Settings = SETTINGS,
    model: Callable[[], nn.Module] = Net,
    **more: Any,
) -> tuple[Mapping[str, Tensor], Any]:
    """Return the state after the run and what the model has seen."""

    def state(module: nn.Module) -> tuple[Mapping[str, Tensor], Any]:
        kept = {name: value.clone() for name, value in module.state_dict().items()}
        return {**kept, "random": torch.get_rng_state()}, getattr(module, "seen", None)

    recipe = Recipe(model, loss, data, **more)
    torch.manual_seed(1)
    return fit(recipe, settings, backend="cpu", finish=state).finish  # type: ignore[no-any-return]


def without(settings: Settings = SETTINGS) -> Settings:
    return dataclasses.replace(settings, evaluate=UNCHECKED)


@pytest.mark.parametrize("kind", ONCE)
def test_a_mean_is_refused(kind: str) -> None:
    said = r"recipe.loss returns a mean for 'loss', .* of 4 samples .* Recipe\(loss_is='mean'\)"
    with pytest.raises(RecipeError, match=said):
        train(ONCE[kind](), mean)


@pytest.mark.parametrize("kind", ONCE)
def test_the_check_changes_no_bit_of_a_sum(kind: str) -> None:
    checked, seen = train(ONCE[kind]())
    expected, of_unchecked = train(ONCE[kind](), settings=without())
    assert seen[:3] == [(False, 4), (False, 2), (False, 2)]
    assert seen[3:] == of_unchecked
    assert all(training for training, _ in of_unchecked)
    assert checked.keys() == expected.keys()
    assert all(torch.equal(checked[name], expected[name]) for name in expected)


def test_a_loader_that_draws_from_the_process_reads_the_same() -> None:
    def ready() -> Batches:
        return Batches(loader(batch_size=5), isolate_random=False)

    checked, expected = train(ready())[0], train(ready(), settings=without())[0]
    assert all(torch.equal(checked[name], expected[name]) for name in expected)


def test_a_declared_mean_trains_and_a_declared_sum_is_refused() -> None:
    assert len(train(ONCE["loader"](), mean, loss_is="mean")[1]) == 3 + 4
    with pytest.raises(RecipeError, match=r"loss_is is 'mean', and recipe.loss returns a sum"):
        train(ONCE["loader"](), distance, loss_is="mean")


def test_a_mean_over_counted_items_is_refused() -> None:
    def mean_of_long(module: nn.Module, batch: Tensor) -> Tensor:
        mask = (batch[:, :1] > -0.5).float()
        return ((module(batch) - 3).square() * mask).sum() / mask.sum()

    def count(batch: Tensor) -> int:
        return int((batch[:, 0] > -0.5).sum())

    with pytest.raises(RecipeError, match=r"recipe.loss returns a mean"):
        train(ONCE["Batches"](), mean_of_long, count_items=count)


def test_a_measure_of_ready_batches_is_checked() -> None:
    def measure(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": mean(module, batch)}

    evaluated = dataclasses.replace(SETTINGS, evaluate=EvaluateSettings())
    held_out = {"held out": ONCE["Batches"]()}
    with pytest.raises(RecipeError, match=r"recipe.measure returns a mean for 'error'.* 4 samples"):
        train(Rows(), settings=evaluated, eval_data=held_out, measure=measure)


def of_first(module: nn.Module, batch: Any) -> Tensor:
    """Return a mean over the samples of a nested batch."""
    return mean(module, batch["x"][0])


@pytest.mark.parametrize("rest", [None, torch.tensor(3.0)], ids=["None", "0-d"])
def test_nested_batches_are_split(rest: Any) -> None:
    batch = {"x": (torch.randn(5, 4), [torch.randn(5, 1)]), "y": {"rest": rest}}
    with pytest.raises(RecipeError, match=r"recipe.loss returns a mean"):
        train(Batches([batch] * 4), of_first)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [torch.randn(5, 4)], "rest": torch.randn(1, 2)},
        {"x": [torch.randn(5, 4)], "rest": "abcde"},
        {"x": [torch.randn(5, 4)], "rest": torch.eye(5).to_sparse()},
        {"x": [torch.randn(1, 4)]},
        defaultdict(list, x=[torch.randn(5, 4)]),
    ],
    ids=["rows", "object", "sparse", "one", "container"],
)
def test_what_cannot_be_split_is_trained_on(batch: Any) -> None:
    """Train with a mean, which nothing could detect."""
    without_batch_norm = partial(nn.Linear, 4, 1)
    assert train(Batches([batch] * 4), of_first, model=without_batch_norm)[0]


def test_a_model_of_one_batch_size_trains() -> None:
    """Let the halves of the first batch fail, in a run that would not meet them."""
    _, seen = train(ONCE["loader"](), model=lambda: Net(refused=2))
    assert seen == [(False, 4), (False, 2)] + [(True, 5)] * 4


def test_a_resumed_run_is_not_checked_again(tmp_path: Path) -> None:
    settings = dataclasses.replace(without(), steps=2)
    fit(Recipe(Net, mean, ONCE["loader"]()), settings, backend="cpu", out=tmp_path)
    again = Recipe(Net, mean, ONCE["loader"]())
    assert fit(again, SETTINGS, backend="cpu", out=tmp_path, resume="auto").step == 4


def test_an_error_of_the_loss_is_raised_by_the_first_step() -> None:
    def failing(module: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        train(ONCE["loader"](), failing)


def test_the_loop_receives_every_microbatch_once() -> None:
    """Require that what follows the first microbatch is what the data yield, not a wrapper."""
    made: list[Group] = []
    closed: list[int] = []

    class Data:
        def groups(self, start: Position, num_steps: int) -> Iterator[Group]:
            try:
                for number in range(num_steps):
                    parts = (Microbatch(10 * number + i, 1, i) for i in range(3))
                    made.append(Group(start, start, 3, 3, parts))
                    yield made[-1]
            finally:
                closed.append(len(made))

    ahead = ReadAhead(Data())
    first = ahead.first(Position(), 3)
    assert first is not None
    assert first.batch == 0
    assert len(made) == 1
    groups = ahead.groups(Position(), 3)
    assert [part.batch for part in next(groups).microbatches] == [0, 1, 2]
    second = next(groups)
    assert second is made[1]
    assert [part.batch for part in second.microbatches] == [10, 11, 12]
    groups.close()  # type: ignore[attr-defined]
    assert closed == [2]
    assert [part.batch for part in next(ahead.groups(Position(), 1)).microbatches] == [0, 1, 2]


def test_halves_of_an_odd_number() -> None:
    split = halve(Microbatch(torch.arange(5), 5, 10))
    assert split is not None
    assert [part.batch.tolist() for part in split] == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert [(part.num_samples, part.offset) for part in split] == [(4, 10), (2, 10), (2, 12)]


RANKS = """
import os, sys, torch
from torch import nn
from drivetrain import Batches, DrivetrainError, Recipe, Settings, fit

backend, kind = sys.argv[1:]
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))
rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(rank))
odd = 5 if rank == 0 else 1 if kind == "uneven" else 4
data = iter([*rows]) if kind == "generator" else Batches([rows[:odd], *rows[8:].split(4)])


def loss(module, batch):
    error = (module(batch) - 3).square()
    return error.sum() if kind == "sum" else error.mean()


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


try:
    recipe = Recipe(model, loss, data)
    said = f"trained {fit(recipe, Settings(steps=2, global_batch=8), backend=backend).step}"
except DrivetrainError as error:
    said = f"{type(error).__name__} {error}"
os.write(1, f"{said}\\n".encode())  # in one piece: all ranks write to one pipe
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Batches", "RecipeError recipe.loss returns a mean for 'loss'"),
        ("generator", "RecipeError recipe.loss returns a mean for 'loss'"),
        ("sum", "trained 2"),
        ("uneven", "trained 2"),  # a rank's batch cannot be split, so none is
    ],
)
def test_ranks_agree(tmp_path: Path, backend: str, kind: str, said: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), backend, kind], capture_output=True, text=True, check=False
    )
    assert done.stdout.count(said) == 2, done.stdout + done.stderr
