"""Predictions of many small samples, with a metric."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .harness import Benchmark, Clock, Column, Measured, peak_bytes, reset_peak, timed
from .problems import Batch, collate

FEATURES, CLASSES = 16, 10
LENGTH = 50_000
"""Samples of a block."""


class Points(torch.utils.data.Dataset[Batch]):
    """Every sample is made from its number, so that the data take no memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.few = torch.randn(1024, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return {"inputs": self.few[index % 1024], "labels": torch.tensor(index % CLASSES)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(logits: Any, labels: Any) -> float:
    return float((torch.as_tensor(logits).argmax(1) == torch.as_tensor(labels)).double().mean())


# --- candidates: each returns the accuracy, having kept all logits --------------------------------


def raw(data: Points, batch: int) -> float:
    return _by_hand(data, batch, torch.inference_mode())


def plain(data: Points, batch: int) -> float:
    """Predict under `no_grad`, as trainers like HF's do. Tensors of `inference_mode` that a data
    set or a metric keeps could not be trained on.
    """
    return _by_hand(data, batch, torch.no_grad())


def _by_hand(data: Points, batch: int, mode: AbstractContextManager[Any]) -> float:
    module = Classifier().eval()
    logits, labels = [], []
    with mode:
        for each in DataLoader(data, batch_size=batch, collate_fn=collate):
            logits.append(module(**each)["logits"])
            labels.append(each["labels"])
    return accuracy(torch.cat(logits), torch.cat(labels))


def kernel(data: Points, batch: int) -> float:
    return _kernel(data, batch, keep=True)


def kernel_streaming(data: Points, batch: int) -> float:
    return _kernel(data, batch, keep=False)


def _kernel(data: Points, batch: int, keep: bool) -> float:
    from drivetrain import Chunk, Recipe
    from drivetrain.data.indexed import Loader
    from drivetrain.data.open_dataset import once
    from drivetrain.data.order import sequential
    from drivetrain.kernel.plan import Plan
    from drivetrain.registry import usable_driver
    from drivetrain.trainer.predictions import gather_predictions
    from drivetrain.trainer.settings import OptimizerSettings

    right = 0

    def receive(chunk: Chunk) -> None:
        nonlocal right
        logits, labels = chunk.outputs
        right += int((logits.argmax(1) == labels).sum())

    def forward(module: nn.Module, each: Batch) -> tuple[Tensor, Tensor]:
        return module(**each)["logits"], each["labels"]

    with usable_driver("cpu").open(Plan()) as session:
        recipe = Recipe(Classifier, lambda module, each: module(**each)["loss"])
        recipe = Recipe(Classifier, recipe.loss, optimizer=OptimizerSettings().build)
        engine = session.prepare(recipe)
        groups = once(
            Loader(data, order=sequential, global_batch=batch, micro_batch=batch, collate=collate)
        )
        with torch.inference_mode():
            predicted = gather_predictions(
                session, engine, forward, groups, receive=None if keep else receive
            )
    return accuracy(*predicted) if keep else right / len(data)


def compat(data: Points, batch: int) -> float:
    from drivetrain.compat import Trainer, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, data, batch)


def hugging_face(data: Points, batch: int) -> float:
    from transformers import Trainer, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, data, batch)


def _as_transformers(trainer: Any, arguments: Any, data: Points, batch: int) -> float:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = arguments(
            output_dir=folder,
            per_device_eval_batch_size=batch,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        predicted = trainer(model=Classifier(), args=args, data_collator=collate).predict(data)
    return accuracy(predicted.predictions, predicted.label_ids)


def accelerate(data: Points, batch: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_size=batch, collate_fn=collate)
    module, loader = accelerator.prepare(Classifier().eval(), loader)
    logits, labels = [], []
    with torch.inference_mode():
        for each in loader:
            both = accelerator.gather_for_metrics((module(**each)["logits"], each["labels"]))
            logits.append(both[0])
            labels.append(both[1])
    return accuracy(torch.cat(logits), torch.cat(labels))


def fabric(data: Points, batch: int) -> float:
    import lightning

    engine = lightning.Fabric(accelerator="cpu", devices=1)
    module = engine.setup(Classifier().eval())
    loader = engine.setup_dataloaders(DataLoader(data, batch_size=batch, collate_fn=collate))
    logits, labels = [], []
    with torch.inference_mode():
        for each in loader:
            logits.append(module(**each)["logits"])
            labels.append(each["labels"])
    return accuracy(torch.cat(logits), torch.cat(labels))


def lightning(data: Points, batch: int) -> float:
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier()

        def predict_step(self, each: Batch, index: int) -> tuple[Tensor, Tensor]:
            return self.model(**each)["logits"], each["labels"]

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    predicted = trainer.predict(Module(), DataLoader(data, batch_size=batch, collate_fn=collate))
    logits, labels = zip(*predicted or (), strict=True)
    return accuracy(torch.cat(logits), torch.cat(labels))


PREDICTORS: dict[str, Callable[[Points, int], float]] = {
    "raw": raw,
    "plain": plain,
    "kernel": kernel,
    "kernel_streaming": kernel_streaming,
    "compat": compat,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
    "hugging_face": hugging_face,
}


def measure(batch: int, candidate: str, quick: bool) -> Iterator[Measured]:
    run, length = PREDICTORS[candidate], LENGTH // 10 if quick else LENGTH
    run(Points(batch * 20), batch)  # imports, and what is compiled or cached at first

    def once(count: int) -> tuple[Clock, int, float]:
        before = reset_peak()
        with timed() as clock:
            right = run(Points(count), batch)
        return clock, peak_bytes() - before, right

    _, small, _ = once(length // 10)
    clock, large, right = once(length)  # later ones find memory that was held before
    while True:
        yield {
            "cpu": clock.cpu,
            "wall": clock.wall,
            "bytes": large,
            "growth": large - small,
            "accuracy": right,
        }
        clock, _, right = once(length)


def _predict(batch: int) -> Benchmark:
    return Benchmark(
        f"predict{batch}",
        f"Predictions of {LENGTH:,} samples, batch {batch}",
        "Ten logits and the label of each sample are kept, on the host, and their accuracy is "
        "reported, which is equal for all; `streaming` keeps no more than a chunk. Who "
        "writes the loop, or calls the kernel, does so under `inference_mode`; HF Trainer, and so "
        "compat, evaluates under `no_grad`, which leaves what a data set keeps fit for training: "
        "the second row is the loop under that. Memory is what is held at most above what was held "
        "before, the first time; it is also measured for a tenth of the samples.",
        {
            "raw": "raw loop",
            "plain": "raw loop, `no_grad`",
            "kernel": "drivetrain kernel",
            "kernel_streaming": "drivetrain kernel, streaming",
            "compat": "drivetrain compat",
            "fabric": "Lightning Fabric",
            "accelerate": "Accelerate",
            "lightning": "Lightning Trainer",
            "hugging_face": "HF Trainer",
        },
        partial(measure, batch),
        (
            Column("CPU s", "cpu"),
            Column("CPU, times raw", "cpu", ratio=True),
            Column("CPU, times `no_grad`", "cpu", ratio=True, base="plain"),
            Column("wall, times raw", "wall", ratio=True),
            Column("MiB", "bytes", scale=2**-20, digits=1),
            Column("MiB more than for a tenth", "growth", scale=2**-20, digits=1),
        ),
        plotted="CPU, times raw",
        equal="accuracy",
        blocks=8,
        needs={
            "fabric": "lightning",
            "accelerate": "accelerate",
            "lightning": "lightning",
            "hugging_face": "transformers",
        },
    )


BENCHMARKS = [_predict(8), _predict(64)]
