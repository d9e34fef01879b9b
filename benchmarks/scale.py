"""Planning a save and a resume of models of 70 and 405 billion parameters over thousands of ranks.

    python -m benchmarks.scale [--document] [--models 70B] [--layouts fsdp] [--sizes 4096,1024]

Real metadata and no tensor data: the files that the measured ranks open have their headers, and the
bytes of the tensors are holes. What one rank does is measured in a process of its own, which has
imported what a run has when it saves or resumes, with the library's own code: at a save, the ranks
that join the index (rank 0 does the most); at a resume, the first, the middle and the last rank of
another world, which read the manifest and the index, compare the model, and find for all that they
hold the bytes of the files in which it lies.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from drivetrain.backends.common import model_state
from drivetrain.backends.fsdp import dtensor
from drivetrain.checkpoint import CheckpointReader, FileEntry, Manifest, list_checkpoints, writer
from drivetrain.checkpoint.format import regions, safetensors
from drivetrain.checkpoint.index.entries import FEW, Index, Stride
from drivetrain.checkpoint.index.tree import join_level, num_levels
from drivetrain.checkpoint.manifest import file_name, write_manifest
from drivetrain.kernel.shards import Box, Flat, Piece, TensorInfo

from . import report
from .counting import reads
from .harness import machine, peak_bytes, reset_peak, timed

Shape = tuple[int, ...]
MOMENTS = ("exp_avg", "exp_avg_sq")
SHARDS = 512
"""Ranks that a model is sharded over under HSDP; groups of so many replicate each other."""


# --- models and layouts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A Llama 3: https://arxiv.org/abs/2407.21783, table 3."""

    layers: int
    width: int
    hidden: int
    key_value_width: int = 1024
    vocabulary: int = 128_256

    @property
    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"embed_tokens.weight": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            inner = {
                "self_attn.q_proj": (self.width, self.width),
                "self_attn.k_proj": (self.key_value_width, self.width),
                "self_attn.v_proj": (self.key_value_width, self.width),
                "self_attn.o_proj": (self.width, self.width),
                "mlp.gate_proj": (self.hidden, self.width),
                "mlp.up_proj": (self.hidden, self.width),
                "mlp.down_proj": (self.width, self.hidden),
                "input_layernorm": (self.width,),
                "post_attention_layernorm": (self.width,),
            }
            shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
        return shapes | {
            "norm.weight": (self.width,),
            "lm_head.weight": (self.vocabulary, self.width),
        }


MODELS = {"70B": Model(80, 8192, 28_672), "405B": Model(126, 16_384, 53_248)}


@dataclass(frozen=True)
class Held:
    """A part of the training state that a rank holds, and whether this rank writes it."""

    kind: Any
    name: str
    shape: Shape
    region: Any
    writes: bool = True


def held(model: str, layout: str, rank: int, size: int) -> Iterator[Held]:
    """Yield the parts that a rank holds, by the rules of the drivers."""
    shapes = MODELS[model].shapes
    if layout in ("fsdp", "hsdp"):
        yield from _chunks(shapes, rank, size, SHARDS if layout == "hsdp" else size)
    elif layout == "zero3":
        yield from _flat_of_each(shapes, rank, size)
    else:
        yield from _flat_of_all(shapes, rank, size)


def _chunks(shapes: dict[str, Shape], rank: int, size: int, num_shards: int) -> Iterator[Held]:
    num_shards = min(num_shards, size)
    replica, shard = divmod(rank, num_shards)
    turn = 0
    for kind, keys in (("weights", ("",)), ("optimizer", MOMENTS)):
        for name, shape in shapes.items():
            box = dtensor.chunk_of(shape, [(0, shard, num_shards)])
            for key in keys:
                if math.prod(box.sizes):
                    writes = replica == turn % (size // num_shards)
                    yield Held(kind, f"{name}/{key}" if key else name, shape, box, writes)
                turn += 1
    steps = {f"{name}/step": torch.tensor(1.0) for name in shapes}
    own = model_state.partitioned_pieces({"optimizer": steps}, rank, size)
    mine = {piece.name for piece in own}
    yield from (Held("optimizer", name, (), None, name in mine) for name in steps)


def _flat_of_each(shapes: dict[str, Shape], rank: int, size: int) -> Iterator[Held]:
    """ZeRO 3: each parameter flat, in parts of one size."""
    for name, shape in shapes.items():
        part = -(-math.prod(shape) // size)
        start = min(rank * part, math.prod(shape))
        yield from _zero(name, shape, start, min(start + part, math.prod(shape)))


def _flat_of_all(shapes: dict[str, Shape], rank: int, size: int) -> Iterator[Held]:
    """ZeRO 1 and 2: all parameters one after the other, in parts of one size."""
    part = -(-sum(map(math.prod, shapes.values())) // size)
    begin = 0
    for name, shape in shapes.items():
        length = math.prod(shape)
        start, stop = max(rank * part - begin, 0), min((rank + 1) * part - begin, length)
        yield from _zero(name, shape, start, stop)
        begin += length


def _zero(name: str, shape: Shape, start: int, stop: int) -> Iterator[Held]:
    if start < stop:
        yield Held("weights", name, shape, Flat(start, stop))
        for key in MOMENTS:
            yield Held("optimizer", f"{name}/{key}", shape, Flat(start, stop))
        yield Held("optimizer", f"{name}/step", (), None, writes=start == 0)


# --- the index of all parts, by the same rules ----------------------------------------------------


def index_by_rule(model: str, layout: str, size: int, low: int, high: int) -> Any:
    """Return the index that joining the headers of the parts from `low` to below `high` would give.
    A test compares the two.
    """
    index, shapes = Index(), MODELS[model].shapes
    num_shards = min(SHARDS, size) if layout == "hsdp" else size
    total, begin = sum(map(math.prod, shapes.values())), 0
    turn = {"": 0, **{key: len(shapes) + n for n, key in enumerate(MOMENTS)}}
    for number, (name, shape) in enumerate(shapes.items()):
        for key in ("", *MOMENTS):
            if layout == "zero2":
                runs = _stretch(begin, math.prod(shape), -(-total // size))
            elif layout == "zero3":
                runs = _stretch(0, math.prod(shape), -(-math.prod(shape) // size))
            else:
                place = turn[key] + number * (1 if not key else len(MOMENTS))
                runs = _rows(shape, num_shards, place % (size // num_shards) * num_shards)
            _add(index, name, key, shape, runs, low, high)
        first = begin // -(-total // size) if layout == "zero2" else 0
        _add(index, name, "step", (), [(first, 1, (), ())], low, high)
        begin += math.prod(shape)
    return index


def _rows(shape: Shape, num_shards: int, base: int) -> list[tuple[int, int, Shape, Shape]]:
    """Return (first part, number of parts, first offsets, sizes) of equal boxes, and of the last
    box.
    """
    chunk = -(-shape[0] // num_shards)
    whole, rest = divmod(shape[0], chunk)
    zeros, inner = (0,) * (len(shape) - 1), shape[1:]
    runs = [(base, whole, (0, *zeros), (chunk, *inner))]
    return runs + ([(base + whole, 1, (whole * chunk, *zeros), (rest, *inner))] if rest else [])


def _stretch(begin: int, length: int, part: int) -> list[tuple[int, int, Any, Any]]:
    """Return the same for flat ranges: of a tensor that begins at `begin`, in parts of one size."""
    first, edge = begin // part, min(part - begin % part, length)
    whole, rest = divmod(length - edge, part)
    runs: list[tuple[int, int, Any, Any]] = [(first, 1, 0, edge)]
    if whole:
        runs.append((first + 1, whole, edge, part))
    if rest:
        runs.append((first + 1 + whole, 1, length - rest, rest))
    return runs


def _add(index: Any, name: str, key: str, shape: Shape, runs: Any, low: int, high: int) -> None:
    kept = []
    for first, count, offset, size in runs:
        begin, stop = max(first, low), min(first + count, high)
        if begin >= stop:
            continue
        if isinstance(offset, int):
            start = offset + (begin - first) * size
            region: Any = Flat(start, start + size)
            by: Shape = (size,)
        else:
            ahead = tuple((begin - first) * each for each in size[:1])
            moved = tuple(a + b for a, b in zip(offset[:1], ahead, strict=True))
            region = Box((*moved, *offset[1:]), size)
            by = (*size[:1], *(0 for _ in size[1:]))
        several = stop - begin > 1
        kept.append(Stride(begin, region, stop - begin, int(several), by if several else ()))
    if kept:
        kind: Any = "optimizer" if key else "weights"
        index.add(kind, f"{name}/{key}" if key else name, TensorInfo(torch.float32, shape), kept)


# --- files without data ---------------------------------------------------------------------------


@cache
def _nothing(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pieces(model: str, layout: str, rank: int, size: int) -> list[Any]:
    """Return the pieces that a rank saves. Only the random state has data."""
    found = [
        Piece(
            each.kind,
            each.name,
            _nothing(regions.result_shape(each.region, each.shape), torch.float32),
            each.shape,
            each.region,
        )
        for each in held(model, layout, rank, size)
        if each.writes
    ]
    for name, length in (("torch", 5056), ("python", 2504), ("numpy", 2504)):
        part = _nothing((length,), torch.uint8)
        found.append(Piece("state", f"{writer.RNG}/{rank}/{name}", part, (length,)))
    return found


def write_headers(folder: Path, model: str, layout: str, size: int, rank: int) -> Any:
    """A rank's files: names, sizes and no sums, as `write_pieces` has them, with holes for data."""
    written, all_pieces = [], pieces(model, layout, rank, size)
    for kind in ("weights", "optimizer", "state"):
        if chosen := [piece for piece in all_pieces if piece.kind == kind]:
            sources, metadata = writer._lay_out(chosen)
            names = sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))
            header = safetensors._header(names, sources, metadata)
            data = sum(piece.tensor.nbytes for piece in chosen)
            path = folder / file_name(kind, rank, size)  # type: ignore[arg-type]
            path.write_bytes(header)
            os.truncate(path, len(header) + data)
            written.append((path.name, len(header) + data, 0, len(header)))
    return written


# --- one rank, in a process of its own ------------------------------------------------------------


def save(folder: Path, model: str, layout: str, size: int) -> dict[str, float]:
    """The metadata's part of a save, of rank 0: what it writes, the index, and the manifest. Ranks
    that have had their turn at a level have left there the indexes that it reads.
    """
    described = json.loads((folder.parent / "files.json").read_text())

    def act() -> None:
        mine = pieces(model, layout, 0, size)
        for kind in ("weights", "optimizer", "state"):
            writer._lay_out([piece for piece in mine if piece.kind == kind])
        entries = tuple(
            FileEntry(*each[:3]) for each in described["files"]
        )  # as they are exchanged
        below = entries
        for level in range(1, num_levels(size) + 1):
            made = join_level(folder, below, level, 0, size)
            assert made is not None
            others = tuple(FileEntry(*each) for each in described["levels"][level - 1])
            below = (FileEntry(*made), *others)
        index = below if below is not entries else ()
        write_manifest(folder, Manifest(1, (*entries, *index), world_size=size))

    return _counted(folder, act)


def resume(folder: Path, model: str, layout: str, size: int, rank: int) -> dict[str, float]:
    """Everything of a resume but reading tensors and comparing checksums, which read the data."""
    planned = {"pieces": 0, "bytes": 0}

    def act() -> None:
        if rank == 0:
            assert len(list_checkpoints(folder.parent).complete) == 1
        reader = CheckpointReader(folder)
        model_state.check_same_model(reader, MODELS[model].shapes)
        for name in reader.names("optimizer"):
            reader.info("optimizer", name)
        for each in held(model, layout, rank, size):
            known, wanted = reader.plan(each.kind, each.name, each.region)
            for _, _, found in wanted:
                planned["pieces"] += len(found)
                for *_, common in found:
                    planned["bytes"] += math.prod(common.sizes) * known.info.dtype.itemsize

    return _counted(folder, act) | {f"planned_{what}": n for what, n in planned.items()}


def _counted(folder: Path, act: Any) -> dict[str, float]:
    memory = reset_peak()
    with reads(folder) as count, timed() as clock:
        act()
    return {
        "wall": clock.wall,
        "cpu": clock.cpu,
        "memory": peak_bytes() - memory,
        "read": count.bytes,
        "opened": len(count.opened),
    }


def apart(act: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Call `act` in a new process that has imported the same modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([dtensor.__name__, typer.__name__])  # what takes seconds
    with context.Pool(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.apply(act, arguments)


# --- one crossing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossing:
    model: str
    layout: str
    writers: int
    readers: int


def cross(crossing: Crossing) -> dict[str, Any]:
    """A save by so many ranks, and a resume by others."""
    model, layout, size = crossing.model, crossing.layout, crossing.writers
    ranks = sorted({0, crossing.readers // 2, crossing.readers - 1})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run", "checkpoint-000001")
        folder.mkdir(parents=True)
        headers = _write_files(folder, crossing, ranks)
        saved = apart(save, folder, model, layout, size)
        (folder.parent / "files.json").unlink()
        resumed = [apart(resume, folder, model, layout, crossing.readers, rank) for rank in ranks]
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.json")}
    return {
        **asdict(crossing),
        "save": saved,
        "resume": {key: max(each[key] for each in resumed) for key in resumed[0]},
        "total_read": crossing.readers * sum(each["read"] for each in resumed) / len(resumed),
        "all_headers": size * headers,
        "index": sizes.get("index.json", 0),
        "manifest": sizes["manifest.json"],
    }


def _write_files(folder: Path, crossing: Crossing, ranks: list[int]) -> float:
    """Write the files that the measured ranks open: headers, and the indexes of other ranks. All
    other bytes are holes. Returns the mean length of the headers of a rank.
    """
    model, layout, size = crossing.model, crossing.layout, crossing.writers
    index, parts = index_by_rule(model, layout, size, 0, size), set(range(min(FEW, size)))
    for rank in ranks:
        for each in held(model, layout, rank, crossing.readers):
            parts.update(index.kinds[each.kind][each.name].parts(each.region))
    files, headers = [], 0
    for part in range(size):
        if part in parts:
            written = write_headers(folder, model, layout, size, part)
            headers += sum(each[3] for each in written)
            files += [each[:3] for each in written]
            continue
        for kind in ("weights", "optimizer", "state"):
            path = folder / file_name(kind, part, size)  # type: ignore[arg-type]
            path.touch()
            os.truncate(path, 1 << 20)
            files.append((path.name, 1 << 20, 0))
    levels: list[list[Any]] = []
    for level in range(1, num_levels(size)):
        levels.append([])
        width = FEW**level
        for rank in range(width, size, width):  # that of rank 0 is measured
            name, raw = f"index-{rank:05d}-{level}.json", b""
            if rank < FEW * width:  # rank 0 reads it
                raw = index_by_rule(model, layout, size, rank, min(rank + width, size)).to_bytes()
                (folder / name).write_bytes(raw)
            levels[-1].append((name, len(raw), zlib.crc32(raw)))
    described = {"files": files, "levels": [*levels, []]}
    (folder.parent / "files.json").write_text(json.dumps(described))
    return headers / len(parts)


# --- the command ----------------------------------------------------------------------------------

COLUMNS = (
    "model",
    "layout",
    "ranks",
    "save: CPU s",
    "MB",
    "MB read",
    "files",
    "resume: CPU s",
    "MB",
    "MB read",
    "files",
    "all ranks: GB read",
    "index, MB",
    "all headers, MB",
)


def row(found: dict[str, Any]) -> list[str]:
    saved, resumed = found["save"], found["resume"]

    def four(each: dict[str, float]) -> list[str]:
        memory, read = each["memory"] / 1e6, each["read"] / 1e6
        return [f"{each['cpu']:.2f}", f"{memory:.0f}", f"{read:.1f}", f"{each['opened']:.0f}"]

    return [
        found["model"],
        found["layout"],
        f"{found['writers']:,} → {found['readers']:,}",
        *four(saved),
        *four(resumed),
        f"{found['total_read'] / 1e9:.1f}",
        f"{found['index'] / 1e6:.2f}",
        f"{found['all_headers'] / 1e6:,.0f}",
    ]


def crossings(models: list[str], layouts: list[str], sizes: list[int]) -> list[Crossing]:
    return [
        Crossing(model, layout, writers, readers)
        for model in models
        for layout in layouts
        for writers, readers in (sizes, sizes[::-1])
    ]


def main(
    models: str = "70B,405B",
    layouts: str = "fsdp,hsdp,zero2,zero3",
    sizes: str = "4096,1024",
    growth: Annotated[str, typer.Option(help="World sizes of the curve; none: ''.")] = (
        "64,256,1024,4096"
    ),
    document: Annotated[bool, typer.Option(help="Write docs/performance.md.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure what one rank does to save and to resume, and print it."""
    torch.set_num_threads(1)
    first, second = map(int, sizes.split(","))
    record: dict[str, Any] = {
        "benchmark": "scale",
        "machine": machine() | {"load_before": os.getloadavg()[0]},
        "crossings": [],
        "growth": [],
    }
    curve = [int(each) for each in growth.split(",") if each]
    todo = {
        "crossings": crossings(models.split(","), layouts.split(","), [first, second]),
        "growth": [Crossing("70B", "fsdp", each, each // 4) for each in curve],
    }
    done: dict[Crossing, dict[str, Any]] = {}  # the last point of the curve is a crossing, too
    for section, planned in todo.items():
        for crossing in planned:
            if crossing not in done:
                print(f"{crossing}", file=sys.stderr)
                done[crossing] = cross(crossing)
            record[section].append(done[crossing])
    found = record["crossings"] + record["growth"]
    print(report.markdown(COLUMNS, [row(each) for each in found]))
    if document:
        report.keep("scale", record, plot)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1))


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot the growth of one rank's work with the number of ranks that wrote."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, (title, key, scale) in zip(
        figure.subplots(1, 3),
        (("CPU seconds", "cpu", 1), ("MB read", "read", 1e-6), ("files opened", "opened", 1)),
        strict=True,
    ):
        sizes = [each["writers"] for each in record["growth"]]
        for act, label in (("save", "save, rank 0"), ("resume", "resume")):
            axes.plot(
                sizes,
                [each[act][key] * scale for each in record["growth"]],
                marker="o",
                label=label,
            )
        if key == "read":
            every = [each["all_headers"] * scale for each in record["growth"]]
            axes.plot(sizes, every, marker="o", linestyle=":", label="all headers")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks that wrote")
        axes.set_title(title)
        axes.legend()
    report.save(figure, path)


ABOUT = """Planning a save and a resume of models of 70 and 405 billion parameters, AdamW, with real
metadata and no tensor data (the files have holes). Save: what rank 0 does, which does the most: the
layout of its own files, its part of the tree of indexes, and the manifest. Resume: what the first,
the middle and the last rank of the other world do, the greatest of each: finding the checkpoint
(rank 0), manifest, index, comparing the model, and finding where in which files all that the rank
holds lies; what a run has imported by then is imported, and what ranks send each other is left out.
Seconds are of the processor, since others may use the machine too; MB is memory above what was held
before. Beside them: what all ranks read together, the index, and what each rank would have to read
without one: all headers. What still grows with the ranks is the list of files in the manifest,
about 110 bytes each. Layouts: `fsdp` over all ranks, `hsdp` over 512 with replicas, `zero2` one
flat range of everything, `zero3` of each parameter."""


def section(record: dict[str, Any]) -> str:
    """Return the section of docs/performance.md."""
    command = report.where({**record, "benchmark": "scale"})
    return (
        f"## Thousands of ranks\n\n{ABOUT}\n\n"
        f"{report.markdown(COLUMNS, [row(each) for each in record['crossings']])}\n"
        "How it grows, 70 billion parameters, `fsdp`, resumed by a quarter of the ranks:\n\n"
        f"{report.markdown(COLUMNS, [row(each) for each in record['growth']])}\n"
        f"{command.replace('benchmarks scale', 'benchmarks.scale')}"
        "\n![growth](performance/scale.svg)\n"
    )


if __name__ == "__main__":
    typer.run(main)
