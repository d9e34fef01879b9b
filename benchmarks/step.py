"""What a trainer adds to each step: a tiny MLP, where the trainer is most of the work.

    uv run --extra test python benchmarks/step.py [--rounds 5] [--steps 3000] [--json FILE]

One process for each candidate and round, one after the other (A B C A B C ...), one thread, the
same data in the same order, AdamW fused, clipping at 1.0, the mean loss logged every 500 steps. A
step is timed as the difference of a long and a short run, so that starting up does not count.
Ratios are taken inside a round. The trained weights must be equal, so all did the same work.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

BATCH, FEATURES, LOG_EVERY, WARM_UP = 8, 16, 500, 300


# --- what all of them train -------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples as Hugging Face's collator wants them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(4096, FEATURES, generator=generator)
        self.labels = self.inputs.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Mlp(nn.Module):
    """Its forward returns the mean squared error under `loss`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(inputs) - labels).square().mean()}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


# --- candidates: each trains for a number of steps and returns the module -----------------------


def raw(steps: int, accumulation: int) -> nn.Module:
    module = Mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH, collate_fn=collate)
    batches, total = iter(loader), torch.zeros(())
    for step in range(1, steps + 1):
        for _ in range(accumulation):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            loss = module(**batch)["loss"] / accumulation
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            print(json.dumps({"step": step, "loss": float(total) / LOG_EVERY}))
            total = torch.zeros(())
    return module


def kernel(steps: int, accumulation: int) -> nn.Module:
    from drivetrain.kernel import Recipe, Settings, fit
    from drivetrain.kernel.settings import (
        DataSettings,
        OptimizerSettings,
        ScheduleSettings,
    )

    def summed(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mean: Tensor = module(**batch)["loss"]
        return mean * len(batch["labels"])

    module = Mlp()
    settings = Settings(
        steps=steps,
        global_batch=BATCH * accumulation,
        micro_batch=BATCH,
        log_every=LOG_EVERY,
        optimizer=OptimizerSettings(lr=1e-3),
        schedule=ScheduleSettings("constant"),
        data=DataSettings(shuffle=False),
    )
    recipe = Recipe(model=lambda: module, loss=summed, train_data=Rows(), collate=collate)
    fit(recipe, settings, backend="cpu", observers=[lambda event: None])
    return module


def compat(steps: int, accumulation: int) -> nn.Module:
    from drivetrain.compat import Trainer, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, steps, accumulation)


def hugging_face(steps: int, accumulation: int) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, steps, accumulation)


def _as_transformers(trainer: Any, arguments: Any, steps: int, accumulation: int) -> nn.Module:
    module = Mlp()
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            model=module,
            args=arguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=accumulation,
                learning_rate=1e-3,
                weight_decay=0.0,
                lr_scheduler_type="constant",
                logging_steps=LOG_EVERY,
                train_sampling_strategy="sequential",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=Rows(),
            data_collator=collate,
        ).train()
    return module


CANDIDATES: dict[str, Callable[[int, int], nn.Module]] = {
    "raw loop": raw,
    "drivetrain kernel": kernel,
    "drivetrain compat": compat,
    "HF Trainer": hugging_face,
}


# --- measuring ----------------------------------------------------------------------------------


def measure(name: str, steps: int, accumulation: int) -> dict[str, float]:
    """Seconds a step in this process, and the sum of the trained weights' squares."""
    torch.set_num_threads(1)
    train = CANDIDATES[name]

    def timed(count: int) -> tuple[float, float, nn.Module]:
        cpu, wall = time.process_time(), time.perf_counter()
        module = train(count, accumulation)
        return time.process_time() - cpu, time.perf_counter() - wall, module

    timed(WARM_UP)  # imports, and what is compiled or cached at first
    short_cpu, short_wall, _ = timed(WARM_UP)
    long_cpu, long_wall, module = timed(WARM_UP + steps)
    return {
        "cpu": (long_cpu - short_cpu) / steps,
        "wall": (long_wall - short_wall) / steps,
        "checksum": sum(float(p.detach().double().square().sum()) for p in module.parameters()),
    }


def rounds_of(count: int, steps: int, accumulation: int) -> dict[str, list[dict[str, float]]]:
    """All candidates in turn, each in a process of its own, `count` times."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CANDIDATES}
    for _ in range(count):
        for name in CANDIDATES:
            command = [sys.executable, __file__, "--one", name, "--steps", str(steps)]
            command += ["--accumulation", str(accumulation)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            measured[name].append(json.loads(done.stdout.splitlines()[-1]))
    sums = [each["checksum"] for rounds in measured.values() for each in rounds]
    if not all(math.isclose(value, sums[0], rel_tol=1e-4) for value in sums):
        raise SystemExit(f"the candidates trained different weights: {sums}")
    return measured


def table_of(measured: dict[str, list[dict[str, float]]], accumulation: int) -> Table:
    table = Table(title=f"accumulation {accumulation}")
    for column in ("candidate", "CPU us/step", "ratio CPU [min-max]", "ratio wall"):
        table.add_column(column)
    raws = measured["raw loop"]
    for name, rounds in measured.items():
        ratios = {
            clock: [own[clock] / base[clock] for own, base in zip(rounds, raws, strict=True)]
            for clock in ("cpu", "wall")
        }
        cpu = ratios["cpu"]
        table.add_row(
            name,
            f"{1e6 * statistics.median(each['cpu'] for each in rounds):.0f}",
            f"{statistics.median(cpu):.2f} [{min(cpu):.2f}-{max(cpu):.2f}]",
            f"{statistics.median(ratios['wall']):.2f}",
        )
    return table


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1)] = 3000,
    accumulation: Annotated[int | None, typer.Option(help="By default 1 and 4.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure all candidates side by side."""
    if one is not None:
        print(json.dumps(measure(one, steps, accumulation or 1)))
        return
    console = Console()
    console.print(f"torch {torch.__version__}, Python {platform.python_version()}, {rounds} rounds")
    told: dict[str, Any] = {}
    for each in (1, 4) if accumulation is None else (accumulation,):
        told[str(each)] = rounds_of(rounds, steps, each)
        console.print(table_of(told[str(each)], each))
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    typer.run(main)
