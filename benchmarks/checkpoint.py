"""Saving and loading the state of a training of 100 million parameters: 1.2 GB in float32."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.buffers import memory

from .harness import Benchmark, Column, Measured, peak_bytes, reset_peak, timed

LAYERS = 24


@dataclass
class State:
    """A model, its optimizer with moments, and the driver's engine around both."""

    engine: Any
    session: Any

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.engine.module
        return found

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = self.engine.optimizer
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state, by name."""
        named = {f"weights/{name}": p.detach() for name, p in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                named[f"optimizer/{name}/{key}"] = value
        return named


@contextmanager
def state_of(width: int, moments: bool = True) -> Iterator[State]:
    from drivetrain import Recipe
    from drivetrain.kernel.plan import Plan
    from drivetrain.registry import usable_driver
    from drivetrain.trainer.settings import OptimizerSettings

    def model() -> nn.Module:
        return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    recipe = Recipe(model, lambda module, _: module[0].weight.sum())
    recipe = Recipe(model, recipe.loss, optimizer=OptimizerSettings().build)
    with usable_driver("cpu").open(Plan()) as session:
        state = State(session.prepare(recipe), session)
        for parameter in state.module.parameters() if moments else ():
            state.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn_like(parameter),
                "exp_avg_sq": torch.rand_like(parameter),
            }
        yield state


class Work:
    """Stand-in for training while a save runs: counts products of matrices on one thread."""

    def __init__(self) -> None:
        self.matrix = torch.randn(256, 256)
        self.count, self.seconds = 0, 0.0

    def until(self, done: Callable[[], bool]) -> None:
        started = time.perf_counter()
        while not done():
            for _ in range(10):
                self.matrix @ self.matrix
            self.count += 10
        self.seconds += time.perf_counter() - started

    def for_a_second(self) -> None:
        stop = time.perf_counter() + 1.0
        self.until(lambda: time.perf_counter() > stop)

    @property
    def rate(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0


# --- saving --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """Seconds that training stood still, and until all was on the disk; what it did meanwhile."""

    still: float
    durable: float
    work: Work


Save = Callable[[State, Path], Saved]


def _still(save: Callable[[State, Path], None]) -> Save:
    """A save during which training stands still."""

    def run(state: State, folder: Path) -> Saved:
        with timed() as clock:
            save(state, folder)
        return Saved(clock.wall, clock.wall, Work())

    return run


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write(state: State, folder: Path) -> None:
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensor in state.tensors().values():
            view = memory(tensor.contiguous())
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _torch_save(state: State, folder: Path) -> None:
    torch.save(state.tensors(), folder / "state.pt")
    _fsync(folder / "state.pt")


def _safetensors(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(state.tensors(), folder / "state.safetensors")
    _fsync(folder / "state.safetensors")


def _dcp(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state.tensors(), checkpoint_id=folder / "dcp", no_dist=True)


def _dcp_async(state: State, folder: Path) -> Saved:
    import torch.distributed.checkpoint as dcp

    work = Work()
    with timed() as whole:
        with timed() as clock:
            saving = dcp.async_save(state.tensors(), checkpoint_id=folder / "dcp")
        work.until(saving.done)
        saving.result()
    return Saved(clock.wall, whole.wall, work)


class _Stores:
    """The store that a run keeps: its host memory is used again."""

    def __init__(self) -> None:
        self.store: Any = None
        self.step = 0

    def next(self, folder: Path) -> Any:
        from drivetrain.checkpoint import CheckpointStore

        self.store = self.store or CheckpointStore(folder, keep_last=1)
        self.step += 1
        return self.store

    def save(self, state: State, folder: Path) -> None:
        self.next(folder).save(self.step, state.engine, state.session, {})

    def background(self, state: State, folder: Path) -> Saved:
        work = Work()
        with timed() as whole:
            with timed() as copying:
                store = self.next(folder)
                saving = store.save_in_background(self.step, state.engine, state.session, {})
            work.until(lambda: bool(saving.written))
            with timed() as committing:
                saving.finish()
        return Saved(copying.wall + committing.wall, whole.wall, work)

    def get_ready(self, state: State, folder: Path) -> None:
        """Reserve the memory of the first save, as a run does after its first step."""
        self.next(folder).get_ready(state.engine, state.session)

    def wait(self) -> None:
        """Wait until the previous checkpoint is removed, which a save does in the background."""
        self.store.wait()


class _Copies:
    """Copies the state into memory that is used again, the least that a background save can do."""

    def __init__(self) -> None:
        self.places: dict[str, Tensor] = {}

    def __call__(self, state: State, folder: Path) -> None:
        for name, tensor in state.tensors().items():
            self.places.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


_STORES = _Stores()

SAVES: dict[str, Save] = {
    "write": _still(_write),
    "copy": _still(_Copies()),
    "kernel": _still(_STORES.save),
    "kernel_behind": _STORES.background,
    "dcp": _still(_dcp),
    "dcp_async": _dcp_async,
    "torch": _still(_torch_save),
    "safetensors": _still(_safetensors),
}


def measure_save(candidate: str, quick: bool) -> Measured:
    if candidate == "dcp_async":
        _one_rank()
    save = SAVES[candidate]
    with state_of(512 if quick else 2048) as state, tempfile.TemporaryDirectory() as temporary:
        alone, folder = Work(), Path(temporary)
        before = reset_peak()
        if candidate == "kernel_behind":
            _STORES.get_ready(state, folder)
            Work().for_a_second()  # the copy is written while training continues
        alone.for_a_second()
        first = save(state, folder)  # which makes the buffers that all others use
        peak = peak_bytes()
        os.sync()
        _touch_free(folder, sum(tensor.nbytes for tensor in state.tensors().values()))
        reset_peak()
        with timed() as clock:
            saved = save(state, folder)
            if candidate.startswith("kernel"):
                _STORES.wait()
        alone.for_a_second()
        figures = {
            "first": first.still,
            "still": saved.still,
            "wall": saved.durable,
            "cpu": clock.cpu,
            "bytes": max(peak, peak_bytes()) - before,
        }
    rate = {"rate": saved.work.rate / alone.rate} if saved.work.seconds else {}
    return figures | rate


def _touch_free(folder: Path, num_bytes: int) -> None:
    """Free memory that a virtual machine's host has taken back costs seconds to be had again, and
    who is charged for it is chance: those who write over an old file pay nothing, those who keep it
    until the new one is there pay all. Have it given before, as pages of a file, which are those
    that the next file takes."""
    block = bytes(1 << 20)
    with open(folder / "nothing", "wb", buffering=0) as file:
        for _ in range(0, 2 * num_bytes, len(block)):
            file.write(block)
    (folder / "nothing").unlink()


def _one_rank() -> None:
    """A process group of one, that DCP's asynchronous save asks for."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file.name}", rank=0, world_size=1
        )


# --- loading: into a model that is there, and an optimizer without state --------------------------


def _fill(state: State, found: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in state.module.named_parameters():
            parameter.copy_(found[f"weights/{name}"])
            state.optimizer.state[parameter] = {
                key: found[f"optimizer/{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }


def _read(state: State, folder: Path) -> None:
    for parameter in state.module.parameters():
        moments = {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        state.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    with open(folder / "raw", "rb", buffering=0) as file:
        for tensor in state.tensors().values():
            view = memory(tensor)
            while view:
                view = view[file.readinto(view) :]


def _kernel_load(state: State, folder: Path) -> None:
    from drivetrain.checkpoint import CheckpointReader, newest

    state.engine.restore(CheckpointReader(newest(folder)))


def _kernel_load_compared(state: State, folder: Path) -> None:
    """Check every file, then load. A resume does the same."""
    from drivetrain.checkpoint import CheckpointReader, newest

    reader = CheckpointReader(newest(folder))
    if damaged := reader.damaged_files():
        raise SystemExit(f"the checkpoint is not as it was written: {damaged}")
    state.engine.restore(reader)


def _torch_load(state: State, folder: Path) -> None:
    _fill(state, torch.load(folder / "state.pt", weights_only=True))


def _safetensors_load(state: State, folder: Path) -> None:
    from safetensors.torch import load_file

    _fill(state, load_file(folder / "state.safetensors"))


def _dcp_load(state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for parameter in state.module.parameters():
        moments = {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        state.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    dcp.load(state.tensors(), checkpoint_id=folder / "dcp", no_dist=True)


LOADS: dict[str, tuple[str, Callable[[State, Path], None]]] = {
    "read": ("write", _read),
    "kernel": ("kernel", _kernel_load),
    "kernel_compared": ("kernel", _kernel_load_compared),
    "dcp": ("dcp", _dcp_load),
    "torch": ("torch", _torch_load),
    "safetensors": ("safetensors", _safetensors_load),
}


def measure_load(candidate: str, quick: bool) -> Measured:
    writer, load = LOADS[candidate]
    width = 512 if quick else 2048
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with state_of(width) as state:
            SAVES[writer](state, folder)
            sums = {"checksum": _sum(state)}
        with state_of(width, moments=False) as state:
            moments = 2 * sum(p.nbytes for p in state.module.parameters())
            before = reset_peak()
            with timed() as clock:
                load(state, folder)
                _touch(state)  # who maps a file has yet to read it, and to copy what is written to
            peak = peak_bytes() - before - moments
            if abs(_sum(state) - sums["checksum"]) > 1e-6 * sums["checksum"]:
                raise SystemExit(f"{candidate} loaded something else: {json.dumps(sums)}")
    return {"wall": clock.wall, "cpu": clock.cpu, "bytes": max(peak, 0)}


def _touch(state: State) -> None:
    """Write to every page, as the next step does."""
    for tensor in state.tensors().values():
        tensor.view(-1)[:: 4096 // tensor.element_size()].mul_(1)


def _sum(state: State) -> float:
    return sum(
        float(tensor.double().square().sum())
        for parameter in state.module.parameters()
        for tensor in (parameter.detach(), state.optimizer.state[parameter]["exp_avg_sq"])
    )


BENCHMARKS = [
    Benchmark(
        "save",
        "Saving 1.2 GB of training state",
        "100 million float32 parameters and two moments, to a local disk; the second save of a "
        "process, when buffers are there. Standstill is how long training waits, and of the first "
        "save, too; a save ends when it is durable (fsync). Training's rate meanwhile is that of "
        "products of matrices on one thread, beside the same without a save. CPU: of everything, "
        "the removal of the checkpoint before as well. Free memory is touched before. Floors: a "
        "plain write with fsync, and one copy into memory that is used again.",
        {
            "write": "floor: write and fsync",
            "copy": "floor: one copy",
            "kernel": "drivetrain kernel",
            "kernel_behind": "drivetrain kernel, in the background",
            "dcp": "torch DCP",
            "dcp_async": "torch DCP, async",
            "torch": "torch.save",
            "safetensors": "safetensors",
        },
        measure_save,
        (
            Column("first standstill s", "first"),
            Column("standstill s", "still"),
            Column("until durable s", "wall"),
            Column("until durable, times the write", "wall", ratio=True),
            Column("CPU s", "cpu"),
            Column("training's rate meanwhile", "rate"),
            Column("MiB more", "bytes", scale=2**-20, digits=0),
        ),
        plotted="until durable, times the write",
        needs={"safetensors": "safetensors"},
    ),
    Benchmark(
        "load",
        "Loading it",
        "Into a model that is there and an optimizer without moments, from a file in the page "
        "cache, until every page has been written to, as a step does. Checksums are of every byte "
        "of every file, as a resume compares them. MiB more: the most that "
        "was held above before, less what the moments take.",
        {
            "read": "floor: plain read",
            "kernel": "drivetrain kernel",
            "kernel_compared": "drivetrain kernel, checksums compared",
            "dcp": "torch DCP",
            "torch": "torch.load",
            "safetensors": "safetensors",
        },
        measure_load,
        (
            Column("wall s", "wall"),
            Column("wall, times the read", "wall", ratio=True),
            Column("wall, times the kernel's", "wall", ratio=True, base="kernel"),
            Column("CPU s", "cpu"),
            Column("MiB more", "bytes", scale=2**-20, digits=0),
        ),
        plotted="wall, times the read",
        needs={"safetensors": "safetensors"},
    ),
]
