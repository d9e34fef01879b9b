"""Loaders that a user's Trainer makes: the same batches in an interrupted and resumed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from drivetrain.compat import Trainer, TrainerCallback, TrainingArguments


class KnowsEpochs:
    """A data set whose samples are their index and the epoch that was set."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"i": torch.tensor([index, self.epoch])}


class Remembers(nn.Module):
    """Keeps the samples that it received."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[Any]()

    def forward(self, i: Tensor, labels: Any = None) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(i.tolist())
        return {"loss": self.layer(i[:, :1].float()).square().mean() * 0}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "generator": lambda: {"shuffle": True, "generator": seeded()},
    "process": lambda: {"shuffle": True},
    "weights": lambda: {"sampler": WeightedRandomSampler(torch.ones(24), 24, generator=seeded())},
    "persistent": lambda: {
        "shuffle": True,
        "num_workers": 1,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
    },
}


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "prepared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own", "prepared"]
)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_of_the_user_s_is_resumed(kind: str, prepared: bool, tmp_path: Path) -> None:
    """Resume in the first epoch, at its end, and in the middle of the second of three."""

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            loader: Any = DataLoader(KnowsEpochs(), batch_size=4, **LOADERS[kind]())  # type: ignore[arg-type]
            return self.accelerator.prepare(loader) if prepared else loader

    def run(stop: int = 0, resume: str | None = None, **reports: bool) -> list[Any]:
        model = Remembers()
        args = TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=3,
            per_device_train_batch_size=4,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            **reports,
        )
        Own(model, args, train_dataset=KnowsEpochs(), callbacks=[Stop(stop)]).train(resume)
        return model.seen

    whole = run()
    for epoch in range(3):
        batches = whole[6 * epoch : 6 * epoch + 6]
        if kind != "weights":
            assert sorted(i for batch in batches for i, _ in batch) == list(range(24))
        if prepared:  # by workers that persist, too
            assert {number for batch in batches for _, number in batch} == {epoch}
    for step in (9,) if kind == "persistent" else (3, 6, 9):
        assert run(step) + run(0, f"{tmp_path}/checkpoint-{step}") == whole, step
    if kind == "persistent":
        return
    for name in ("memory_parts", "find_nonfinite"):  # which look at the batches on their way
        asked = {name: True}
        assert run(3, **asked) + run(0, f"{tmp_path}/checkpoint-3", **asked) == whole, name


def test_an_epoch_without_a_full_batch_is_named(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=99,
        dataloader_drop_last=True,
        use_cpu=True,
        report_to="none",
    )
    with pytest.raises(ValueError, match="24 training samples make no batch: with drop_last"):
        Trainer(Remembers(), args, train_dataset=KnowsEpochs()).train()
