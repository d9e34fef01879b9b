"""Batches of the trainer's loaders, compared with those of transformers' Trainer on the
same data.
"""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler as TheirRebalance
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirGrouped

from drivetrain.compat.data.lengths import LengthsByEpoch, has_length
from drivetrain.compat.data.sharding import shard
from drivetrain.compat.data.workers import seed_worker
from drivetrain.compat.trainer.loading import LoadingMixin, order_seed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.linear(x.float()).sum()}


class Accelerator:
    """Stand-in for the facade, with the parts that the loaders use."""

    def __init__(self, args: Any, rank: int, size: int) -> None:
        self.args, self.reader_index, self.num_readers = args, rank, size

    def prepare(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        return shard(loader, self, seed=order_seed(self.args))


class Trainer(LoadingMixin):
    """Stand-in for the trainer, with the parts that its loaders use."""

    is_deepspeed_enabled = False
    processing_class: Any = None
    label_names = ["labels"]  # noqa: RUF012  # an instance attribute of the real one
    _signature_columns = None

    def __init__(
        self,
        args: Any,
        train: Any = None,
        evaluation: Any = None,
        collate: Callable[[list[Any]], Any] = list,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        self.args, self.model = args, Model()
        self.train_dataset, self.eval_dataset, self.data_collator = train, evaluation, collate
        self._train_batch_size = args.train_batch_size
        self.accelerator = Accelerator(args, *ranks)


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., Any]:
    """Return transformers' arguments on the CPU, with two samples a batch and the given values."""

    def make(**given: Any) -> Any:
        options: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3,
        }
        return transformers.TrainingArguments(**options | given)

    return make


def rows(count: int = 11) -> list[dict[str, Any]]:
    return [{"x": index, "labels": -index, "note": "unused"} for index in range(count)]


def drawn(loader: DataLoader[Any]) -> list[list[int]]:
    return [[row["x"] for row in batch] for batch in loader]


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(rows(5))


@pytest.mark.row("D1", "D4", "D5", "R8")
@pytest.mark.parametrize("given", [{}, {"seed": 3}, {"seed": 3, "data_seed": 9}])
def test_training_order_is_that_of_transformers(
    arguments: Callable[..., Any], given: dict[str, int]
) -> None:
    args = arguments(**given)
    theirs = transformers.Trainer(Model(), args, list, rows()).get_train_dataloader()
    ours = Trainer(args, rows()).get_train_dataloader()
    for epoch in range(3):
        theirs.set_epoch(epoch)  # type: ignore[attr-defined]
        ours.set_epoch(epoch)  # type: ignore[attr-defined]
        torch.rand(1)
        assert drawn(ours) == drawn(theirs)


@pytest.mark.row("D6", "D3", "D17")
@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_order_is_that_of_transformers(
    arguments: Callable[..., Any], drop_last: bool
) -> None:
    args = arguments(dataloader_drop_last=drop_last)
    reference = transformers.Trainer(Model(), args, list, eval_dataset=rows())
    trainer = Trainer(args, evaluation=rows())
    assert drawn(trainer.get_eval_dataloader()) == drawn(reference.get_eval_dataloader())
    assert drawn(trainer.get_test_dataloader(rows(4))) == drawn(
        reference.get_test_dataloader(rows(4))
    )


@pytest.mark.row("D6", "D26")
def test_two_ranks_together_read_everything_in_order(arguments: Callable[..., Any]) -> None:
    args = arguments()
    loaders = [
        Trainer(args, evaluation=rows(8), ranks=(rank, 2)).get_eval_dataloader() for rank in (0, 1)
    ]
    rounds = [sum(parts, []) for parts in zip(*map(drawn, loaders), strict=True)]
    assert sum(rounds, []) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert loaders[1].remainder == 2  # type: ignore[attr-defined]


@pytest.mark.row("D1", "D2")
def test_no_data_set_is_an_error_and_names_choose(arguments: Callable[..., Any]) -> None:
    trainer = Trainer(arguments())
    with pytest.raises(ValueError, match="train_dataset="):
        trainer.get_train_dataloader()
    with pytest.raises(ValueError, match="eval_dataset="):
        trainer.get_eval_dataloader()
    trainer.eval_dataset = {"a": rows(2), "b": rows(3)}
    assert drawn(trainer.get_eval_dataloader("b")) == [[0, 1, 2]]
    assert drawn(trainer.get_eval_dataloader(rows(1))) == [[0]]
    trainer._train_batch_size, trainer.train_dataset = 5, rows()
    assert len(drawn(trainer.get_train_dataloader())[0]) == 5


@pytest.mark.row("D7")
def test_a_stream_has_no_sampler(
    arguments: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(arguments(train_sampling_strategy="group_by_length"), Stream())
    assert drawn(trainer.get_train_dataloader()) == [[0, 1], [2, 3], [4]]
    assert not has_length(Stream())
    assert trainer._get_train_sampler() is None and "own order" in caplog.text


@pytest.mark.row("D11", "D14")
def test_columns_of_arrow_data_sets_are_left_out(arguments: Callable[..., Any]) -> None:
    data = datasets.Dataset.from_list(rows(3))
    trainer = Trainer(arguments(), data)
    (first, *_) = trainer.get_train_dataloader()
    assert set(first[0]) == {"x", "labels"}
    assert data.column_names == ["x", "labels", "note"]
    assert trainer._signature_columns == ["x", "labels", "label", "label_ids"]
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        trainer.get_test_dataloader(data.select_columns(["note"]))


@pytest.mark.row("D12", "D13")
def test_keys_of_other_samples_are_left_out(
    arguments: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain.compat.trainer.loading")
    trainer = Trainer(arguments(), rows(4))
    for batch in trainer.get_train_dataloader():
        assert all(set(row) == {"x", "labels"} for row in batch)
    assert caplog.text.count("note") == 1
    (pair,) = Trainer(arguments(), [1, 2]).get_train_dataloader()
    assert sorted(pair) == [1, 2]
    kept = Trainer(arguments(remove_unused_columns=False), rows(2)).get_train_dataloader()
    assert all("note" in row for batch in kept for row in batch)


@pytest.mark.row("D15")
def test_grouping_by_length_is_that_of_transformers(arguments: Callable[..., Any]) -> None:
    sizes = torch.randint(1, 50, (83,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = LengthsByEpoch(4, sizes, seed=5)
    ours.set_epoch(2)
    theirs = TheirGrouped(4, lengths=sizes, generator=torch.Generator().manual_seed(7))
    assert list(ours) == list(ours) == list(theirs) and len(ours) == 83
    assert sizes[next(iter(ours))] == max(sizes)
    data = [{"input_ids": [0] * size} for size in sizes]
    grouped = arguments(train_sampling_strategy="group_by_length")
    assert Trainer(grouped, data)._lengths(data) == sizes
    with pytest.raises(ValueError, match="input_ids"):
        Trainer(grouped, [1, 2])._lengths([1, 2])


@pytest.mark.row(
    "D15",
    status="differs",
    note="the order is a function of seed and epoch, so a resumed run keeps it",
)
def test_grouped_training_is_repeatable(arguments: Callable[..., Any]) -> None:
    args = arguments(train_sampling_strategy="group_by_length", length_column_name="size")
    data = datasets.Dataset.from_list([{"x": i, "size": i % 7} for i in range(40)])
    trainer = Trainer(args, data, data)
    loader = trainer.get_train_dataloader()
    first, second = drawn(loader), drawn(loader)
    assert first != second and sorted(sum(first, [])) == list(range(40))
    loader.set_epoch(0)  # type: ignore[attr-defined]
    torch.rand(3)
    assert drawn(loader) == first
    args.remove_unused_columns = False  # or theirs would not see the column of lengths
    reference = transformers.Trainer(Model(), args, list, data, data)
    assert drawn(trainer.get_eval_dataloader()) == drawn(reference.get_eval_dataloader())


@pytest.mark.row("D16")
def test_other_strategies(arguments: Callable[..., Any]) -> None:
    trainer = Trainer(arguments(train_sampling_strategy="sequential"), rows(4))
    assert isinstance(trainer._get_train_sampler(), SequentialSampler)
    assert drawn(trainer.get_train_dataloader()) == [[0, 1], [2, 3]]
    assert isinstance(Trainer(arguments(), rows())._get_train_sampler(), RandomSampler)
    data = [{"x": i, "input_ids": [0] * (i + 1)} for i in range(9)]
    rebalance = arguments(train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=2)
    loader = Trainer(rebalance, data).get_train_dataloader()
    assert len(loader) == 6
    batches = drawn(loader)
    sampler = TheirRebalance(list(range(1, 10)), 4, 1, 2, seed=42, drop_last=False)
    assert batches == list(sampler) and set(sum(batches, [])) == set(range(9))


def test_workers_send_tensors_whatever_the_length_of_tmpdir(
    arguments: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    args = arguments(dataloader_num_workers=1)
    loader = Trainer(args, list(range(4)), collate=torch.tensor).get_train_dataloader()
    assert sum(int(batch.sum()) for batch in loader) == 6


@pytest.mark.row("D18", "D19", "D20")
def test_workers(arguments: Callable[..., Any]) -> None:
    args = arguments(
        dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=3
    )
    trainer = Trainer(args, rows(), {"a": rows(2)})
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
    assert loader.worker_init_fn is not None and loader.pin_memory is False
    evaluation = trainer.get_eval_dataloader("a")
    assert evaluation.worker_init_fn is None
    assert trainer.get_eval_dataloader("a") is evaluation
    assert trainer.get_test_dataloader(rows(1)) is not trainer.get_test_dataloader(rows(1))


@pytest.mark.row("D20")
def test_workers_are_seeded_by_rank() -> None:
    drawn = []
    for rank in (0, 1, 0):
        torch.manual_seed(0)
        seed_worker(0, num_workers=2, rank=rank)
        drawn.append(torch.rand(1).item())
    assert drawn[0] != drawn[1] and drawn[0] == drawn[2]


@pytest.mark.row("D22", "D23")
def test_counting(arguments: Callable[..., Any]) -> None:
    trainer = Trainer(arguments(), rows(11))
    assert trainer.num_examples(trainer.get_train_dataloader()) == 11
    sharded = Trainer(arguments(), Stream(), ranks=(1, 2)).get_train_dataloader()

    class Sized(Stream):
        def __len__(self) -> int:
            return 5

    assert trainer.num_examples(shard(DataLoader(Sized()), trainer.accelerator)) == 5
    with pytest.raises(TypeError):
        trainer.num_examples(sharded)
    batches = [{"input_ids": torch.zeros(2, 3)}, {"input_ids": torch.zeros(1, 3)}]
    assert trainer.num_tokens(batches) == 9  # type: ignore[arg-type]
    assert trainer.num_tokens(batches, max_steps=4) == 24  # type: ignore[arg-type]
    assert trainer.get_total_train_batch_size(arguments(gradient_accumulation_steps=3)) == 6


class Pair(NamedTuple):
    left: Tensor
    right: str


@pytest.mark.row("D24")
def test_batches_are_moved_with_their_containers(arguments: Callable[..., Any]) -> None:
    trainer = Trainer(arguments())
    trainer.args = type("Args", (), {"device": torch.device("meta")})()
    moved = trainer._prepare_inputs(
        transformers.BatchEncoding({"a": torch.ones(1), "b": [torch.ones(1), ("c", torch.ones(1))]})
    )
    assert type(moved) is transformers.BatchEncoding
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["b"][1][1].is_meta
    pair = trainer._prepare_input(Pair(torch.ones(1), "kept"))
    assert type(pair) is Pair and pair.left.is_meta and pair.right == "kept"
    with pytest.raises(ValueError, match="empty"):
        trainer._prepare_inputs({})


@pytest.mark.row("D25")
def test_deepspeed_gives_floating_inputs_its_dtype(arguments: Callable[..., Any]) -> None:
    class Config:
        def dtype(self) -> torch.dtype:
            return torch.bfloat16

    trainer = Trainer(arguments())
    plugin = type("Plugin", (), {"hf_ds_config": Config()})()
    trainer.accelerator.state = type("State", (), {"deepspeed_plugin": plugin})()
    trainer.is_deepspeed_enabled = True
    batch = trainer._prepare_input({"x": torch.ones(1), "ids": torch.ones(1, dtype=torch.int64)})
    assert (batch["x"].dtype, batch["ids"].dtype) == (torch.bfloat16, torch.int64)
