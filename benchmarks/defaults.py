"""Defaults that speed up a run, each beside its alternatives.

docs/decisions/0017-speed-by-default.md draws the conclusions. The first candidate of each benchmark
is drivetrain's default; ratios are to it.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .harness import Benchmark, Column, Measured, finish, peak_bytes, reset_peak, timed
from .problems import GPT, Batch, Gpt, checksum, collate, summed_loss

__all__ = ["BENCHMARKS"]

WALL = (
    Column("ms", "wall", scale=1e3, digits=1),
    Column("times drivetrain's", "wall", ratio=True),
)
SHORT = (Column("µs", "wall", scale=1e6, digits=0), WALL[1])
MEMORY = (*WALL, Column("MiB", "bytes", scale=2**-20, digits=0))


def deep(width: int) -> nn.Module:
    """24 layers: with a small batch its gradients are as much work as its products."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(24)))


# --- updates, of gradients that are there ---------------------------------------------------------

OPTIMIZERS = {
    "fused": {},
    "foreach": {"fused": False, "foreach": True},
    "loop": {"fused": False, "foreach": False},
}


@contextmanager
def engine_of(arguments: dict[str, Any]) -> Iterator[Any]:
    """A driver's engine around the GPT, on CUDA where there is any."""
    from drivetrain import OptimizerSettings, Recipe, Settings
    from drivetrain.registry import usable_driver

    optimizer = OptimizerSettings(args=arguments)
    driver = usable_driver("ddp" if torch.cuda.is_available() else "cpu")
    with driver.open(Settings(optimizer=optimizer).plan()) as session:
        yield session.prepare(Recipe(Gpt, lambda module, batch: batch, optimizer=optimizer.build))


def updates(engine: Any, update: Callable[[], object], quick: bool) -> Measured:
    """Seconds of an update; the gradients are put there beforehand, and not counted."""
    torch.manual_seed(1)
    grads = [1e-3 * torch.randn_like(p) for p in engine.parameters]
    seconds = []
    for _ in range(3 if quick else 15):
        for parameter, grad in zip(engine.parameters, grads, strict=True):
            parameter.grad = grad.clone()
        finish()
        with timed() as clock:
            update()
            finish()
        seconds.append(clock.wall)
    return {"wall": statistics.median(seconds), "checksum": checksum(engine.module)}


def measure_optimizer(candidate: str, quick: bool) -> Measured:
    with engine_of(OPTIMIZERS[candidate]) as engine:
        return updates(engine, engine.update, quick)


def measure_clipping(candidate: str, quick: bool) -> Measured:
    with engine_of({}) as engine:

        def by_hand() -> None:
            norm = nn.utils.clip_grad_norm_(engine.parameters, 1.0)
            if candidate == "always" or norm.isfinite().item():
                engine.optimizer.step()
            engine.optimizer.zero_grad()

        return updates(engine, engine.update if candidate == "driver" else by_hand, quick)


# --- what a step leaves behind --------------------------------------------------------------------


def steps(
    module: nn.Module, own: nn.Module, batch: int, set_to_none: bool, quick: bool
) -> Measured:
    """Seconds of a step of SGD, and the most memory above what was held before the first."""
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-2)
    rows = torch.randn(batch, own[0][0].in_features)  # type: ignore[index, union-attr]
    before, seconds = reset_peak(), []
    for _ in range(3 if quick else 15):
        with timed() as clock:
            module(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        seconds.append(clock.wall)
    return {
        "wall": statistics.median(seconds),
        "bytes": peak_bytes() - before,
        "checksum": checksum(own),
    }


def measure_zero_grad(candidate: str, quick: bool) -> Measured:
    module = deep(1024)
    return steps(module, module, 256, candidate == "none", quick)


def measure_buckets(candidate: str, quick: bool) -> Measured:
    torch.distributed.init_process_group("gloo")
    module = deep(1024)
    before = reset_peak()
    wrapped = nn.parallel.DistributedDataParallel(
        module, gradient_as_bucket_view=candidate == "views"
    )
    wrapping = reset_peak() - before
    found = steps(wrapped, module, 2, True, quick)
    torch.distributed.destroy_process_group()
    return found | {"bytes": found["bytes"] + wrapping}


# --- data -----------------------------------------------------------------------------------------


class Table(torch.utils.data.Dataset[Batch]):
    """Rows in memory."""

    def __init__(self) -> None:
        self.rows = torch.arange(50_000 * 16, dtype=torch.float32).view(50_000, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return {"rows": self.rows[index]}


class Many(Table):
    """Fetches the samples of a batch by one call."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [{"rows": row} for row in self.rows[list(indices)].unbind()]


class Whole(Table):
    """Fetches a batch as such: its collate has nothing to do."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return {"rows": self.rows[list(indices)]}


TABLES: dict[str, tuple[type[Table], dict[str, Any]]] = {
    "many": (Many, {}),
    "whole": (Whole, {"collate": lambda batch: batch}),
    "one": (Table, {}),
    "isolated": (Table, {"isolate_random": True}),
}


def _read(loader: Any, start: Any, num_steps: int) -> float:
    """The sum of all that is read from there on."""
    found = 0.0
    with closing(loader.groups(start, num_steps)) as groups:
        for group in groups:
            found += sum(float(each.batch["rows"].sum()) for each in group.microbatches)
    return found


def measure_fetching(candidate: str, quick: bool) -> Measured:
    from drivetrain.data.indexed import Loader
    from drivetrain.kernel.batches import Position

    table, options = TABLES[candidate]
    loader = Loader(dataset=table(), global_batch=64, micro_batch=64, **options)
    num_steps = loader.steps_per_epoch // (10 if quick else 1)
    _read(loader, Position(), 10)
    with timed() as clock:
        found = _read(loader, Position(), num_steps)
    return {"wall": clock.wall / num_steps, "checksum": found}


def measure_workers(candidate: str, quick: bool) -> Measured:
    from drivetrain.data.indexed import Loader
    from drivetrain.kernel.batches import Position

    epochs, per_epoch = (2 if quick else 10), 100
    loader = Loader(
        dataset=torch.utils.data.Subset(Many(), range(64 * per_epoch)),
        global_batch=64,
        micro_batch=64,
        workers=2,
        isolate_random=False,
    )
    with timed() as clock:
        if candidate == "one":
            found = _read(loader, Position(), epochs * per_epoch)
        else:
            found = sum(_read(loader, Position(epoch), per_epoch) for epoch in range(epochs))
    return {"wall": clock.wall / epochs, "checksum": found}


# --- what runs the model --------------------------------------------------------------------------


def measure_inference(candidate: str, quick: bool) -> Measured:
    from drivetrain import OptimizerSettings, Recipe
    from drivetrain.data.indexed import Loader
    from drivetrain.data.open_dataset import once
    from drivetrain.data.order import sequential
    from drivetrain.kernel.plan import Plan
    from drivetrain.registry import usable_driver
    from drivetrain.trainer.predictions import gather_predictions

    def forward(module: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = module(batch["rows"])[:, :1]
        return found

    recipe = Recipe(lambda: deep(16), forward, optimizer=OptimizerSettings().build)
    data = torch.utils.data.Subset(Many(), range(2_000 if quick else 16_000))
    mode = torch.inference_mode() if candidate == "inference_mode" else nullcontext()
    with usable_driver("cpu").open(Plan()) as session:
        engine = session.prepare(recipe)
        with mode, timed() as clock:
            groups = once(Loader(data, order=sequential, global_batch=8, micro_batch=8))
            found = gather_predictions(session, engine, forward, groups)
    return {"wall": clock.wall, "checksum": float(found.double().sum())}


def measure_compiling(candidate: str, quick: bool) -> Measured:
    from drivetrain import DataSettings, Recipe, ScheduleSettings, Settings
    from drivetrain.kernel.events import RunStarted, StepEnded
    from drivetrain.trainer.fit import fit

    def model() -> nn.Module:
        module = Gpt()
        module.blocks = module.blocks[: 1 if quick else 3]
        if candidate == "blocks":
            for block in module.blocks:
                block.compile()
        return module

    modules: list[nn.Module] = []
    at: list[float] = []

    def kept() -> nn.Module:
        modules.append(model())
        return modules[-1]

    def watch(event: Any) -> None:
        if isinstance(event, RunStarted | StepEnded):
            at.append(time.perf_counter())

    settings = Settings(
        steps=4 if quick else 8,
        global_batch=GPT.batch,
        compile=candidate == "whole",
        schedule=ScheduleSettings("constant"),
        data=DataSettings(shuffle=False),
    )
    recipe = Recipe(kept, summed_loss, train_data=GPT.data(), collate=collate)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # nothing is there from an earlier round
        fit(recipe, settings, backend="cpu", observers=[watch])
    between = [after - before for before, after in itertools.pairwise(at)]
    return {
        "first": between[0],
        "wall": statistics.median(between[2:]),
        "checksum": checksum(modules[0]),
    }


# --- all of them ----------------------------------------------------------------------------------

ALIKE = "The first row is what drivetrain does; all end with equal weights, or nothing is shown."
READ = "The first row is what drivetrain does; all read the same samples."


def _default(
    name: str,
    title: str,
    about: str,
    candidates: dict[str, str],
    measure: Callable[[str, bool], Measured],
    columns: tuple[Column, ...] = WALL,
    processes: int = 1,
) -> Benchmark:
    return Benchmark(
        name,
        title,
        about,
        candidates,
        measure,
        columns,
        plotted="times drivetrain's",
        equal="checksum",
        processes=processes,
    )


BENCHMARKS = (
    _default(
        "optimizer",
        "An update by AdamW",
        f"Of the GPT of 10 million parameters, with clipping, by the driver. {ALIKE}",
        {"fused": "fused", "foreach": "`foreach`", "loop": "a loop over parameters"},
        measure_optimizer,
    ),
    _default(
        "clipping",
        "Clipping",
        "The same update. On the host the driver looks at the norm before it scales gradients; on "
        "CUDA, which is measured where there is any, nobody waits for it. What that saves shows "
        f"where work is queued behind, which one update alone has not. {ALIKE}",
        {
            "driver": "the driver",
            "always": "`clip_grad_norm_`",
            "looked": "`clip_grad_norm_`, `.item()` for NaN",
        },
        measure_clipping,
    ),
    _default(
        "zero_grad",
        "Clearing gradients",
        "A step of SGD, by hand, of 24 layers of 1,024, batch 256, on the host; memory above that "
        f"of the weights. {ALIKE}",
        {"none": "set to None", "zeroed": "zeroed"},
        measure_zero_grad,
        MEMORY,
    ),
    _default(
        "buckets",
        "Gradients that are views of DDP's buckets",
        "The same model, batch 2 on each of 2 processes, gloo; memory above that of the weights, "
        "of rank 0. "
        f"{ALIKE}",
        {"views": "views", "copies": "copies"},
        measure_buckets,
        MEMORY,
        processes=2,
    ),
    _default(
        "fetching",
        "Fetching samples of 16 numbers",
        "A batch of 64, through the kernel's loader, in this process. `isolated` seeds Python's, "
        "torch's and NumPy's generators for each sample, as is done with workers and ahead of a "
        f"device. {READ}",
        {
            "many": "`__getitems__`",
            "whole": "`__getitems__` that gives the batch",
            "one": "`__getitem__`",
            "isolated": "`__getitem__`, isolated",
        },
        measure_fetching,
        SHORT,
    ),
    _default(
        "workers",
        "Data workers through epochs",
        f"An epoch of 100 batches, two workers. {READ}",
        {"one": "the same through all epochs", "each": "new ones each epoch"},
        measure_workers,
    ),
    _default(
        "inference",
        "What predictions run under",
        "24 layers of 16 over 16,000 samples, batch 8, by the kernel. Both predict the same.",
        {"no_grad": "`no_grad`", "inference_mode": "`inference_mode`"},
        measure_inference,
    ),
    _default(
        "compiling",
        "Compiling",
        "Three layers of the GPT, on the host, by inductor with an empty cache; seconds until the "
        "first step is done. The first row is the default, and the second what `compile` does; the "
        "third is for the recipe's model to do (`block.compile()`). All end with equal weights.",
        {"none": "not compiled", "whole": "the whole model", "blocks": "each block"},
        measure_compiling,
        (Column("first step, s", "first", digits=1), *WALL),
    ),
)
