"""Data that draw random numbers in data workers: a resumed run ends bit-equal."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import Classifier, both, losses, samples
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import TrainerCallback

from drivetrain.compat.data.worker_states import WorkerStates
from drivetrain.data.own_generators import end_workers

PER_EPOCH = 4
STEPS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 2 * PER_EPOCH + 1,
    "dataloader_num_workers": 2,
}


def noise() -> Any:
    return torch.rand(4) + random.random() + float(np.random.rand())


class Augmented(Dataset[Any]):
    """Data that draws from the generators of the process, and from one of its own."""

    def __init__(self) -> None:
        self.kept, self.own = samples(), np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert get_worker_info() is not None
        x = self.kept[index]["x"] * noise() + float(self.own.random())
        return {**self.kept[index], "x": x}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        info: Any = get_worker_info()
        for sample in samples()[info.id :: info.num_workers]:
            yield {**sample, "x": sample["x"] * noise()}


def collate(rows: list[Any]) -> dict[str, Any]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "x": batch["x"] + torch.rand(())}


class EndsWorkers(TrainerCallback):
    """Ends persistent workers after training; otherwise they stay until garbage is collected."""

    def on_train_end(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        end_workers(train_dataloader)


@pytest.mark.row("K12", "R4", "D18")
@pytest.mark.parametrize(
    ("data", "persistent", "steps"),
    [
        (Augmented, False, (1, PER_EPOCH, PER_EPOCH + 3)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (Augmented, True, (3, PER_EPOCH, PER_EPOCH + 2)),
                (Stream, False, (1, PER_EPOCH + 2)),
            ]
        ),
    ],
)
def test_a_resumed_run_draws_the_numbers_of_its_workers(
    data: Any, persistent: bool, steps: tuple[int, ...], tmp_path: Path, caplog: Any
) -> None:
    """Resume in the middle of an epoch and at its end; resume a resumed run, too."""
    dropping = partial(Classifier, dropout=0.2)
    keywords = {**STEPS, "train_dataset": data(), "data_collator": collate}
    keywords |= {"dataloader_persistent_workers": persistent, "callbacks": [EndsWorkers]}
    ours, theirs = both(tmp_path / "whole")
    whole = ours.trainer(dropping, **keywords)
    whole.train()
    root = Path(whole.args.output_dir)
    plain = theirs.trainer(dropping, **{**keywords, "save_strategy": "no"})
    plain.train()
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-6)
    for number, step in enumerate(steps):
        torch.manual_seed(99 + step)
        again = both(tmp_path / str(step))[0].trainer(dropping, **keywords)
        again.train(resume_from_checkpoint=str(root / f"checkpoint-{step}"))
        assert losses(again) == losses(whole), step
        for own, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(own, other), step
        if number == 0:
            root = Path(again.args.output_dir)
    assert "random state" not in caplog.text


def test_other_workers_are_named(tmp_path: Path, caplog: Any) -> None:
    """Require a warning that other workers do not draw the same numbers again."""
    ours = both(tmp_path)[0]
    keywords = {**STEPS, "max_steps": 1, "train_dataset": Augmented()}
    ours.trainer(**keywords).train()
    with caplog.at_level(logging.WARNING):
        again = ours.trainer(**{**keywords, "dataloader_num_workers": 1, "max_steps": 2})
        again.train(resume_from_checkpoint=str(ours.folder / "checkpoint-1"))
    assert "dataloader_num_workers=1: " in caplog.text
    assert "holds no random state of such data workers" in caplog.text


GOOD = {"again": 0, "seeding": "", "states": [None, None]}


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b"7",
        *(
            json.dumps({**GOOD, **odd}).encode()
            for odd in (
                {},
                {"seeding": "AAAA"},
                {"again": -1},
                {"again": True},
                {"states": 5},
                {"states": ["{}"]},
            )
        ),
    ],
)
def test_states_that_are_none_are_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="states of data workers are malformed"):
        WorkerStates(2).resume(0, 1, stored)
