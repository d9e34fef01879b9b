"""The candidates: each trains a problem for a number of steps, and returns the module.

All do the same: AdamW, fused, without decay; clipping at 1.0; the mean loss since the last log, and
the gradient's norm, where they log it by default. Launched by torchrun, each is one rank of DDP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sized
from functools import partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .problems import Problem, collate, plain

RATE, CLIP = 1e-3, 1.0
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0, fused=True)


def _loader(problem: Problem, sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(problem.data(), batch_size=problem.batch, collate_fn=collate, sampler=sampler)


def _sampler(problem: Problem) -> Any:
    """Return a sampler of this rank's share of the data, in order; None for the whole."""
    from torch.utils.data import DistributedSampler

    # given here, since Lightning makes the process group after the loader
    shared = {"num_replicas": WORLD, "rank": RANK, "shuffle": False}
    return DistributedSampler(problem.data(), **shared) if WORLD > 1 else None


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _log(step: int, total: Tensor, every: int) -> None:
    if RANK == 0:
        print(json.dumps({"step": step, "loss": float(total) / every}))


def _wrapped(module: nn.Module, searching: bool = False) -> Any:
    """Wrap the module in DDP if there are several ranks. `searching`: let DDP search for parameters
    that an update does not use.
    """
    if WORLD == 1:
        return module
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(
        module, gradient_as_bucket_view=True, find_unused_parameters=searching
    )


def tuned(problem: Problem, steps: int, accumulation: int, searching: bool = False) -> nn.Module:
    """Train with a loop written by hand that saves calls wherever it can, and still checks each
    norm.
    """
    module, data = problem.model(), problem.data()
    wrapped, optimizer = _wrapped(module, searching), _optimizer(module)
    parameters = [*module.parameters()]
    samples = cycle(range(RANK, len(cast(Sized, data)), WORLD))
    weight, total = torch.tensor(1.0 / accumulation), torch.zeros(())
    for step in range(1, steps + 1):
        for index in range(accumulation):
            batch = collate([data[next(samples)] for _ in range(problem.batch)])
            last = index == accumulation - 1
            with contextlib.nullcontext() if last or WORLD == 1 else wrapped.no_sync():
                loss = wrapped(**batch)["loss"]
                loss.backward(weight)
            total += loss.detach()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if math.isfinite(norm_now := float(norm)):
            if norm_now > CLIP:
                torch._foreach_mul_(gradients, CLIP / (norm + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = RATE
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if step % problem.log_every == 0:
            _log(step, total / accumulation, problem.log_every)
            total = torch.zeros(())
    return module


def tuned_searching(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    """Train with the tuned loop, but let DDP search for parameters that an update does not use."""
    return tuned(problem, steps, accumulation, searching=True)


def raw(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    """Train with a plain loop, written by hand."""
    module = problem.model()
    wrapped, optimizer = _wrapped(module), _optimizer(module)
    batches, total = _endless(_loader(problem, _sampler(problem))), torch.zeros(())
    for step in range(1, steps + 1):
        for index in range(accumulation):
            batch = next(batches)
            last = index == accumulation - 1
            with contextlib.nullcontext() if last or WORLD == 1 else wrapped.no_sync():
                loss = wrapped(**batch)["loss"] / accumulation
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % problem.log_every == 0:
            _log(step, total, problem.log_every)
            total = torch.zeros(())
    return module


def kernel(
    problem: Problem, steps: int, accumulation: int, saved_every: int | None = None
) -> nn.Module:
    from drivetrain import Recipe, Settings
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.settings import (
        CheckpointSettings,
        DataSettings,
        OptimizerSettings,
        ScheduleSettings,
    )

    module = problem.model()
    settings = Settings(
        steps=steps,
        global_batch=problem.batch * accumulation * WORLD,
        micro_batch=problem.batch,
        max_grad_norm=CLIP,
        log_every=problem.log_every,
        optimizer=OptimizerSettings(lr=RATE),
        schedule=ScheduleSettings("constant"),
        data=DataSettings(shuffle=False),
        checkpoint=CheckpointSettings(every=saved_every, at_end=False, background=True),
    )
    recipe = Recipe(
        model=lambda: module, loss=problem.sum, train_data=problem.data(), collate=collate
    )
    backend = "ddp" if WORLD > 1 else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        out = folder if saved_every else None
        fit(recipe, settings, backend=backend, out=out, observers=[lambda event: None])
    return module


def kernel_saving(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    """The whole state every 5 steps, in the background."""
    return kernel(problem, steps, accumulation, saved_every=5)


def compat(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    from drivetrain.compat import Trainer, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, problem, steps, accumulation)


def compat_all_used(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    """Train with compat, but without the search for parameters that an update does not use. Hugging
    Face's Trainer searches by default, loops by hand do not.
    """
    from drivetrain.compat import Trainer, TrainingArguments

    arguments = partial(TrainingArguments, ddp_find_unused_parameters=False)
    return _as_transformers(Trainer, arguments, problem, steps, accumulation)


def hugging_face(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, problem, steps, accumulation)


def _as_transformers(
    trainer: Any, arguments: Any, problem: Problem, steps: int, accumulation: int
) -> nn.Module:
    module = problem.model()
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            model=module,
            args=arguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=problem.batch,
                gradient_accumulation_steps=accumulation,
                learning_rate=RATE,
                weight_decay=0.0,
                max_grad_norm=CLIP,
                lr_scheduler_type="constant",
                logging_steps=problem.log_every,
                train_sampling_strategy="sequential",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=problem.data(),
            data_collator=collate,
        ).train()
    return module


def accelerate(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    module = problem.model()
    wrapped, optimizer, loader = accelerator.prepare(module, _optimizer(module), _loader(problem))
    batches, total = _endless(loader), torch.zeros(())
    for step in range(1, steps + 1):
        for _ in range(accumulation):
            batch = next(batches)  # which marks the epoch's last batch, before it is read
            with accelerator.accumulate(wrapped):
                loss = wrapped(**batch)["loss"]
                accelerator.backward(loss)
                total += loss.detach() / accumulation
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        if step % problem.log_every == 0:
            _log(step, total, problem.log_every)
            total = torch.zeros(())
    return plain(module)


def fabric(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    import lightning

    strategy = "ddp" if WORLD > 1 else "auto"
    engine = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    engine.launch()
    module = problem.model()
    wrapped, optimizer = engine.setup(module, _optimizer(module))
    batches, total = _endless(engine.setup_dataloaders(_loader(problem))), torch.zeros(())
    for step in range(1, steps + 1):
        for index in range(accumulation):
            batch = next(batches)
            with engine.no_backward_sync(wrapped, enabled=index < accumulation - 1):
                loss = wrapped(**batch)["loss"] / accumulation
                engine.backward(loss)
            total += loss.detach()
        engine.clip_gradients(wrapped, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % problem.log_every == 0:
            _log(step, total, problem.log_every)
            total = torch.zeros(())
    return module


def lightning(problem: Problem, steps: int, accumulation: int) -> nn.Module:
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = problem.model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.model)

    class Report(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step % problem.log_every == 0 and RANK == 0:
                loss = float(trainer.callback_metrics["loss"])
                print(json.dumps({"step": trainer.global_step, "loss": loss}))

    module = Module()
    L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulation,
        # with a method of its own for fused optimizers it refuses to clip
        gradient_clip_val=CLIP,
        log_every_n_steps=problem.log_every,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report()],
        use_distributed_sampler=False,  # its own shuffles
    ).fit(module, _loader(problem, _sampler(problem)))
    return module.model


TRAINERS: dict[str, Callable[[Problem, int, int], nn.Module]] = {
    "tuned": tuned,
    "tuned_searching": tuned_searching,
    "raw": raw,
    "kernel": kernel,
    "kernel_saving": kernel_saving,
    "compat": compat,
    "compat_all_used": compat_all_used,
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning,
    "hugging_face": hugging_face,
}
