"""Thirty planted NaNs and infinities, and ten clean runs: what a run names."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .harness import ROOT, Benchmark, Column, Measured, torchrun

__all__ = ["BENCHMARKS"]

STEPS, BATCH, MICRO = 8, 8, 2
"""Steps of a run, and samples of a step and of a microbatch."""
DRIVERS = {"cpu": "cpu", "ddp": "ddp, two ranks", "fsdp": "fsdp, two ranks"}
OPTIONS: dict[str, dict[str, Any]] = {"cpu": {}, "ddp": {}, "fsdp": {"optimizer_step": "parts"}}
PLACES = {"forward": 2, "backward": 2, "sample": 2, "weight": 1, "loss": 2, "gradient": 1}
"""Place of a planted value -> the number of runs of each driver that have it."""
CLEAN = {"cpu": 4, "ddp": 3, "fsdp": 3}
PARTLY = ("operation", "tensor")
"""Fields that may have more text than is known: `torch.` before an operation, and which of the
parameters of a layer gets its gradient first."""

Operation = Callable[[Tensor, Tensor], Tensor]


class Divides(torch.autograd.Function):
    """The identity, whose backward divides by zero for the bad sample."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (bad,) = ctx.saved_tensors
        return gradients[0] / (1 - bad), None


FORWARD: list[tuple[str, Operation]] = [
    ("log", lambda x, bad: torch.log(2 - 9 * bad + 0 * x)),
    ("exp", lambda x, bad: torch.exp(x + 200 * bad)),
    ("rsqrt", lambda x, bad: x * torch.rsqrt(1 - bad)),
    ("softmax", lambda x, bad: F.softmax(x.masked_fill(bad.bool(), -math.inf), -1)),
    ("div", lambda x, bad: x / (1 - bad)),
    ("layer_norm", lambda x, bad: F.layer_norm(x * (1 - bad), (16,), eps=0.0)),
]
BACKWARD: list[tuple[str, Operation]] = [
    ("sqrt", lambda x, bad: torch.sqrt((x * (1 - bad)).square())),
    ("pow", lambda x, bad: (x * (1 - bad)).abs() ** 0.5),
    ("acos", lambda x, bad: torch.acos((x * (1 - bad)).clamp(-0.5, 0.5) + bad)),
    ("sqrt", lambda x, bad: x + (x * (1 - bad)).square().sum(1, keepdim=True).sqrt()),
    ("DividesBackward", cast(Operation, Divides.apply)),
    ("sqrt", lambda x, bad: torch.where(bad > 0, 0.0, (x.square() * (1 - bad)).sqrt())),
]
LOSS: list[tuple[str, Operation]] = [
    ("log", lambda y, bad: torch.log(y.square() + 1 - 9e9 * bad).sum()),
    ("mse_loss", lambda y, bad: F.mse_loss(y, bad * 1e30, reduction="sum")),
    ("kl_div", lambda y, bad: F.kl_div(y, 1 - 2 * bad, reduction="sum")),
    ("div", lambda y, bad: (y / (1 - bad)).square().sum()),
    ("sqrt", lambda y, bad: torch.sqrt(y.square() + 1 - 9e9 * bad).sum()),
    ("exp", lambda y, bad: torch.exp(y + 200 * bad).sum()),
]
SAMPLE = (math.nan, math.inf, -math.inf)
PARAMETERS = ("blocks.0.up.weight", "blocks.1.up.weight", "blocks.1.up.bias")


@dataclass(frozen=True)
class Plant:
    """A value that is not finite, in one run."""

    driver: str
    place: str
    """A key of `PLACES`; empty for a clean run."""
    number: int
    """The operation, value or parameter."""
    step: int
    row: int
    """The sample in its global batch."""

    @property
    def bad(self) -> int:
        """The sample's place in the data; -1 for none."""
        per_sample = self.place not in ("", "weight")
        return BATCH * (self.step - 1) + self.row if per_sample else -1

    @property
    def block(self) -> int:
        """The block of the model that computes it."""
        return self.number % 2

    @property
    def parameter(self) -> str:
        return PARAMETERS[self.number % len(PARAMETERS)]

    def expected(self) -> dict[str, Any]:
        """Return the fields of `NonFiniteFound` that are known; of `PARTLY` a part of the text."""
        ranks = 1 if self.driver == "cpu" else 2
        rank, row = divmod(self.row, BATCH // ranks)
        known: dict[str, Any] = {"step": self.step, "rank": rank, "microbatch": row // MICRO}
        sample = {"sample": row % MICRO, "data": f"sample {self.bad} of epoch 0 ({self.bad})"}
        module = f"blocks.{self.block}.act"
        if self.place == "forward":
            operation = FORWARD[self.number][0]
            return {**known, **sample, "phase": "forward", "module": module, "operation": operation}
        if self.place == "backward":
            operation = BACKWARD[self.number][0]
            known |= {"phase": "backward", "module": module, "operation": operation}
            return {**known, **sample, "tensor": f"blocks.{self.block}.up."}
        if self.place == "loss":
            operation = LOSS[self.number][0]
            return {**known, **sample, "phase": "forward", "module": "", "operation": operation}
        if self.place == "sample":
            values = "NaN" if math.isnan(SAMPLE[self.number % len(SAMPLE)]) else "infinity"
            return {**known, **sample, "tensor": "batch['x']", "values": values}
        if self.place == "gradient":
            return {**known, "phase": "backward", "tensor": self.parameter}
        # the weight is the same for all samples of all ranks
        named = {"step": self.step, "phase": "forward", "tensor": self.parameter}
        return {**named, "rank": 0, "microbatch": 0}


def plants(driver: str) -> list[Plant]:
    """Return a driver's plants: operations, steps and samples are others on each driver."""
    turn = [*DRIVERS].index(driver)
    result = []
    for place, count in PLACES.items():
        for number in range(count * turn, count * turn + count):
            many = len(result)
            step = 2 + (many + turn) % (STEPS - 2)
            result.append(Plant(driver, place, number, step, (3 * many + turn) % BATCH))
    return result


# --- the runs -------------------------------------------------------------------------------------


class Up(nn.Linear):
    """A layer that plants NaN in the gradient of one of its parameters."""

    poisoned = ""
    """Name of the parameter."""
    _hook: Any = None

    def forward(self, inputs: Tensor, bad: Tensor | None = None) -> Tensor:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.poisoned and bad is not None and bool(bad.any()):
            parameter = getattr(self, self.poisoned)
            self._hook = parameter.register_hook(lambda gradient: gradient * math.nan)
        return super().forward(inputs)


class Act(nn.Module):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
        return self.operation(inputs, bad)


class Block(nn.Module):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.up, self.act, self.down = Up(8, 16), Act(operation), nn.Linear(16, 8)

    def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
        changed: Tensor = self.down(self.act(self.up(inputs, bad), bad))
        return inputs + changed


class Model(nn.Module):
    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block(_operation(plant, block)) for block in range(2))
        self.last = nn.Linear(8, 1)
        if plant.place == "gradient":
            owner, _, name = plant.parameter.rpartition(".")
            cast(Up, self.get_submodule(owner)).poisoned = name

    def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
        # infinities of a mask, as models have them, must not be named
        mask = torch.full((8, 8), -math.inf, device=inputs.device).triu(1).softmax(-1)
        hidden = self.norm(self.first(inputs)) @ mask
        for block in self.blocks:
            hidden = block(hidden, bad)
        result: Tensor = self.last(hidden)
        return result


def _operation(plant: Plant, block: int) -> Operation:
    known = {"forward": FORWARD, "backward": BACKWARD}.get(plant.place)
    if known is None or block != plant.block:
        return lambda inputs, bad: torch.tanh(inputs)
    return known[plant.number][1]


class Poisons(torch.optim.AdamW):
    """AdamW that writes NaN in a weight after a step."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], plant: Plant) -> None:
        named = list(named)
        super().__init__([each for _, each in named], lr=1e-3)
        self.target = dict(named).get(plant.parameter) if plant.place == "weight" else None
        self.plant, self.count = plant, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        parted = hasattr(self.target, "to_local")  # then one rank has the fault
        mine = not parted or os.environ.get("RANK") == "1"
        if self.target is not None and self.count == self.plant.step - 1 and mine:
            local: Tensor = getattr(self.target, "to_local", lambda: self.target)()
            local.view(-1)[0] = math.nan


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, plant: Plant) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(BATCH * STEPS, 4, generator=generator)
        if plant.place == "sample":
            self.rows[plant.bad, plant.number % 4] = SAMPLE[plant.number % len(SAMPLE)]
        self.bad = -1 if plant.place == "sample" else plant.bad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.rows[index], "bad": torch.tensor([float(index == self.bad)])}


def train(plant: Plant) -> list[dict[str, Any]]:
    """Return what a run named, as fields of `NonFiniteFound`."""
    from drivetrain import Recipe, Settings
    from drivetrain.kernel.errors import NonFiniteTraining
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.setting_values import override

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        result = module(batch["x"], batch["bad"])
        if plant.place == "loss":
            return LOSS[plant.number][1](result, batch["bad"])
        summed: Tensor = result.square().sum()
        return summed

    found: list[dict[str, Any]] = []

    def see(event: Any) -> None:
        if type(event).__name__ == "NonFiniteFound":
            found.append(asdict(event))

    values = {"steps": STEPS, "global_batch": BATCH, "micro_batch": MICRO, "data.shuffle": False}
    values |= {"evaluate.sanity_check": False, "checkpoint.at_end": False, "log_every": 10}
    with contextlib.suppress(NonFiniteTraining):  # by a weight that stays as it is
        fit(
            Recipe(
                model=lambda: Model(plant),
                loss=loss,
                train_data=Rows(plant),
                optimizer=lambda named: Poisons(named, plant),
            ),
            override(Settings(), values),
            backend=plant.driver,
            backend_options=OPTIONS[plant.driver],
            observers=[see],
        )
    return found


def _runs(driver: str, quick: bool) -> list[tuple[Plant, list[dict[str, Any]]]]:
    chosen = plants(driver) + [Plant(driver, "", 0, 0, 0)] * CLEAN[driver]
    chosen = chosen[:: len(PLACES)] if quick else chosen
    return [(plant, train(plant)) for plant in chosen]


# --- what is named --------------------------------------------------------------------------------


def measure(candidate: str, quick: bool) -> Measured:
    """Planted values that were named, and clean runs in which something was."""
    began = time.perf_counter()
    runs = _runs(candidate, quick) if candidate == "cpu" else _on_ranks(candidate, quick)
    figures = dict.fromkeys(("planted", "named", "clean", "named in clean"), 0.0)
    for plant, found in runs:
        if not plant.place:
            figures["clean"] += 1
            figures["named in clean"] += bool(found)
            continue
        figures["planted"] += 1
        figures["named"] += not (wrong := _wrong(plant, found))
        said = found[0]["text"] if found else "nothing"
        print(f"{plant}: {wrong or 'named'}: {said}", file=sys.stderr)
    return {**figures, "seconds": time.perf_counter() - began}


def _wrong(plant: Plant, found: list[dict[str, Any]]) -> str:
    """Describe how the first thing that was named is not what was planted; empty if it is."""
    if not found:
        return "NOT NAMED"
    off = {
        key: found[0][key]
        for key, value in plant.expected().items()
        if (value not in found[0][key] if key in PARTLY else value != found[0][key])
    }
    return f"NOT AS EXPECTED {off}, but {plant.expected()}" if off else ""


def _on_ranks(driver: str, quick: bool) -> list[tuple[Plant, list[dict[str, Any]]]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(2, folder), "-m", "benchmarks.nonfinite", driver, str(int(quick))]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    runs = json.loads(done.stdout.splitlines()[-1])
    return [(Plant(**plant), found) for plant, found in runs]


def _as_rank(driver: str, quick: bool) -> None:
    torch.set_num_threads(1)
    runs = [(asdict(plant), found) for plant, found in _runs(driver, quick)]
    if os.environ["RANK"] == "0":
        print(json.dumps(runs), flush=True)


BENCHMARKS = [
    Benchmark(
        "nonfinite",
        "NaNs and infinities that a run names, of those that were planted",
        f"Runs of {STEPS} steps of {BATCH} samples, each with one value that is not finite: made "
        "by an operation of a module's forward or backward or of the loss, in a sample, in a "
        "weight, or in a parameter's gradient by a hook; at many steps, microbatches and samples. "
        "Named: the run gives the step, the rank, the microbatch, and the module and operation, "
        "the parameter or the part of the batch; where an operation or a sample is the cause, the "
        "sample, too. Models have a mask of infinities, which must not be named.",
        DRIVERS,
        measure,
        (
            Column("planted", "planted", digits=0),
            Column("named", "named", digits=0),
            Column("clean runs", "clean", digits=0),
            Column("clean runs with a name", "named in clean", digits=0),
            Column("seconds", "seconds", digits=0),
        ),
        plotted="named",
    )
]

if __name__ == "__main__":
    _as_rank(sys.argv[1], bool(int(sys.argv[2])))
