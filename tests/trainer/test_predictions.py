"""Predictions of any structure: each sample once, in the order of the data."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data.thread_world import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import drivetrain
from drivetrain.backends.cpu import driver
from drivetrain.kernel.contract import Engine, Session
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.recipe import Recipe
from drivetrain.trainer.predictions import Chunk, gather_predictions

from .problems import eval_groups

quickly = settings(deadline=None, max_examples=60)
Pair = namedtuple("Pair", "left right")


def engine() -> Engine:
    recipe = Recipe(
        model=lambda: nn.Linear(1, 1),
        loss=lambda module, batch: module(batch).sum(),
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
    )
    with driver.open(Plan()) as session:
        prepared: Engine = session.prepare(recipe)
        return prepared


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def predicted(
    num_samples: int,
    forward: Callable[[nn.Module, Tensor], Any],
    *,
    size: int = 1,
    micro_batch: int = 3,
    fixed_size: bool = False,
    **options: Any,
) -> list[Any]:
    model = engine()

    def job(session: Session) -> Any:
        groups = eval_groups(
            Numbers(num_samples),
            micro_batch=micro_batch,
            num_readers=size,
            reader_index=session.world.reader_index,
            fixed_size=fixed_size,
        )
        return gather_predictions(session, model, forward, groups, **options)

    return on_ranks(job, size)


def ragged(module: nn.Module, batch: Tensor) -> Any:
    """Return rows whose width depends on the largest element of the batch."""
    return {"row": batch.clone(), "wide": batch[:, None].repeat(1, int(batch.max()) % 5 + 1)}


@quickly
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_each_sample_once_in_order(
    num_samples: int, size: int, micro_batch: int, fixed_size: bool, groups_in_chunk: int
) -> None:
    for outputs in predicted(
        num_samples,
        ragged,
        size=size,
        micro_batch=micro_batch,
        fixed_size=fixed_size,
        groups_in_chunk=groups_in_chunk,
        padding=-7,
    ):
        assert outputs["row"].tolist() == list(range(num_samples))
        for index, row in enumerate(outputs["wide"].tolist()):
            counted = [value for value in row if value != -7]
            assert counted == [index] * len(counted)
            assert counted
            assert row[: len(counted)] == counted


@pytest.mark.parametrize("size", [1, 3])
def test_chunks_come_in_order_and_only_to_those_who_ask(size: int) -> None:
    chunks: dict[int, list[Chunk]] = {rank: [] for rank in range(size)}
    model = engine()

    def job(session: Session) -> Any:
        world = session.world
        groups = eval_groups(
            Numbers(20), micro_batch=2, num_readers=size, reader_index=world.reader_index
        )
        return gather_predictions(
            session,
            model,
            lambda module, batch: batch,
            groups,
            groups_in_chunk=2,
            ranks=[0],
            receive=chunks[world.rank].append,
        )

    assert on_ranks(job, size) == [None] * size
    assert [chunk.first for chunk in chunks[0]] == list(range(0, 20, 4 * size))
    assert torch.cat([chunk.outputs for chunk in chunks[0]]).tolist() == list(range(20))
    assert sum(chunk.num_samples for chunk in chunks[0]) == 20
    assert not any(chunks[rank] for rank in range(1, size))


def test_only_ranks_that_ask_get_the_whole() -> None:
    whole, none = predicted(5, lambda module, batch: batch, size=2, ranks=[0])
    assert whole.tolist() == [0, 1, 2, 3, 4]
    assert none is None


def test_structures_come_back() -> None:
    def forward(module: nn.Module, batch: Tensor) -> Any:
        return (batch, [Pair(batch + 1, None)], {"a": {"b": batch.bool()}})

    ((first, [pair], nested),) = predicted(4, forward)
    assert first.tolist() == [0, 1, 2, 3]
    assert type(pair) is Pair
    assert pair.left.tolist() == [1, 2, 3, 4]
    assert pair.right is None
    assert nested["a"]["b"].tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda module, batch: batch.float().mean(), r"shapes \{'': \(\)\} for a batch of 3"),
        (lambda module, batch: {"a": batch[:1]}, r"\{'a': \(1,\)\} for a batch of 3"),
        (lambda module, batch: None, r"shapes \{\}"),
        (lambda module, batch: [batch, "text"], "the output '1' is a str"),
        (lambda module, batch: {str(batch[0] > 0): batch}, "every batch must give the same"),
        (
            lambda module, batch: batch[:, None, None].repeat(1, 2, int(batch[0]) + 1),
            "may differ in the first two",
        ),
    ],
)
def test_what_cannot_be_gathered_is_named(forward: Any, message: str) -> None:
    (error,) = predicted(7, forward)
    assert isinstance(error, RecipeError)
    with pytest.raises(RecipeError, match=message):
        raise error


def test_if_ranks_differ_too_much_all_report_it() -> None:
    def forward(module: nn.Module, batch: Tensor) -> Tensor:
        return batch[:, None, None].repeat(1, 2, 1 + int(batch[0] == 0))

    errors: Sequence[Any] = predicted(4, forward, size=2, micro_batch=2)
    assert all("differ between ranks" in str(error) for error in errors)


def test_training_goes_on_as_if_nothing_happened() -> None:
    model = engine()
    model.module.train()
    seen: list[tuple[bool, bool]] = []

    def forward(module: nn.Module, batch: Tensor) -> Tensor:
        seen.append((module.training, torch.is_grad_enabled()))
        return torch.rand(len(batch))

    with driver.open(Plan()) as session:
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        groups = eval_groups(Numbers(5), micro_batch=2)
        gather_predictions(session, model, forward, groups)
        assert torch.equal(torch.rand(2), expected)
    assert set(seen) == {(False, False)}
    assert model.module.training


class Doubler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, batch: Tensor) -> Tensor:
        return batch.double() * self.factor


def test_anybody_can_predict_with_public_names_alone(tmp_path: Path) -> None:
    inputs = torch.arange(11.0).unsqueeze(1)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().sum()

    recipe = drivetrain.Recipe(model=Doubler, loss=loss, train_data=inputs)
    settings = drivetrain.Settings(global_batch=4, steps=3)
    found = drivetrain.predict(recipe, inputs, settings=settings, backend="cpu")
    assert torch.equal(found, 2 * inputs.double())

    trained = drivetrain.fit(recipe, settings, backend="cpu", out=tmp_path / "run")
    chunks: list[drivetrain.Chunk] = []
    drivetrain.predict(
        recipe, inputs, tmp_path / "run", settings=settings, backend="cpu", receive=chunks.append
    )
    factor = drivetrain.predict(recipe, torch.ones(1, 1), trained.checkpoint, backend="cpu")
    assert factor.item() != 2.0
    assert torch.equal(torch.cat([chunk.outputs for chunk in chunks]), inputs.double() * factor)


def test_predicting_from_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    recipe = drivetrain.Recipe(model=Doubler, loss=lambda module, batch: module(batch).sum())
    with pytest.raises(drivetrain.UsageError, match="no complete checkpoint"):
        drivetrain.predict(recipe, torch.ones(1, 1), tmp_path, backend="cpu")
