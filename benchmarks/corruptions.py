"""Sixty planted corruptions of a run's numbers, and 1,000 clean steps: what a witness names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .corrupted import BITS, PLANTED, Plant
from .harness import ROOT, Benchmark, Column, Measured

__all__ = ["BENCHMARKS"]

RECIPE = ROOT / "benchmarks" / "corrupted.py"
EACH, STRETCH, BATCH = 12, 2, 8
"""Corruptions of a driver, steps from one checkpoint to the next, samples of a step."""
CLEAN_STEPS, CLEAN_EVERY = 200, 100
"""Steps of a driver's clean run, and from one checkpoint to the next."""
TARGETS = ("weight", "gradient", "moment", "sample")
WEIGHT = "1.weight"
"""The tensor that is corrupted."""


@dataclass(frozen=True)
class Driver:
    title: str
    words: tuple[str, ...]
    has_parts: bool = False
    """True if each rank holds a part of the weights, so that a corruption has a rank."""
    readers: int = 1
    """Ranks that read samples."""


PARTS = "--set=backend.optimizer_step=parts"
DRIVERS = {
    "cpu": Driver("cpu", ("--backend=cpu",)),
    "ddp": Driver(
        "ddp, two ranks", ("--backend=ddp", "--nproc=2", "--set=backend.device=cpu"), readers=2
    ),
    "fsdp": Driver("fsdp, two ranks", ("--backend=fsdp", "--nproc=2", PARTS), True, readers=2),
    "zero-3": Driver(
        "deepspeed, stage=3",
        ("--backend=deepspeed", "--nproc=2", "--set=backend.stage=3"),
        True,
        readers=2,
    ),
    "tensor": Driver(
        "mesh, tensor=2", ("--backend=mesh", "--nproc=2", "--set=backend.tensor=2", PARTS), True
    ),
}


@dataclass(frozen=True)
class Expected:
    """The difference that a verdict must name first. `where` begins its place, if known."""

    step: int
    quantities: tuple[str, ...]
    where: str


def plants(driver: str) -> list[tuple[Plant, Expected]]:
    """Return a corruption for each stretch of a driver's run: three of the four kinds of bits in
    each target. Over the drivers each kind meets each target.

    A moment is corrupted at the end of a stretch, where the checkpoint holds it. So are the lowest
    bits of a gradient, which may change the moment alone. On ddp all ranks have the corruption, or
    the run itself would end, since the copies of its weights differ; so no rank is expected.
    """
    of, kinds = DRIVERS[driver], [*BITS]
    left_out = [*DRIVERS].index(driver)
    result = []
    for number in range(EACH):
        target = TARGETS[number % len(TARGETS)]
        chosen = [k for k in range(len(kinds)) if k != (left_out + number) % len(kinds)]
        kind = kinds[chosen[number // len(TARGETS)]]
        at_end = target == "moment" or (target == "gradient" and BITS[kind][0] == 1)
        at_end = at_end or (target != "gradient" and number // len(TARGETS) == 1)
        step = STRETCH * number + (STRETCH if at_end else 1)
        rank = (number + number // len(TARGETS)) % 2
        if target == "sample":
            place = (3 * number) % BATCH
            plant = Plant(target, BATCH * (step - 1) + place, "all", kind)
            reader = f", of reader {of.readers * place // BATCH}" if of.readers > 1 else ""
            result.append((plant, Expected(step, ("samples",), f"{place}{reader} of {BATCH}")))
            continue
        plant = Plant(target, step, str(rank) if of.has_parts else "all", kind)
        moment, weight = f"optimizer {WEIGHT}/exp_avg", f"weight {WEIGHT}"
        named = {"weight": (weight,), "gradient": (weight,), "moment": (moment,)}[target]
        if target == "gradient" and at_end:
            named = (weight, moment)
        result.append(
            (plant, Expected(step, named, f"saved by rank {rank}" if of.has_parts else ""))
        )
    return result


def is_named(expected: Expected, verdict: Mapping[str, Any]) -> bool:
    """Return True if a verdict begins with the step, tensor and rank of a corruption."""
    if verdict["outcome"] != "different":
        return False
    first = verdict["first"]
    named = first["step"] == expected.step and first["quantity"] in expected.quantities
    return named and first["where"].startswith(expected.where)


def measure(candidate: str, quick: bool) -> Measured:
    """Corruptions that a witness named, and stretches of a clean run that it found different."""
    chosen = plants(candidate)[: 4 if quick else EACH]
    every = 10 if quick else CLEAN_EVERY
    steps = 20 if quick else CLEAN_STEPS
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = (f"--steps={STRETCH * len(chosen)}", "--set=data.shuffle=false")
        environment = {PLANTED: " ".join(str(plant) for plant, _ in chosen)}
        train(Path(folder), candidate, STRETCH, words, environment)
        verdicts = judge(Path(folder))
    named = 0
    for (plant, expected), verdict in zip(chosen, verdicts, strict=True):
        named += is_named(expected, verdict)
        _show(candidate, plant, expected, verdict)
    planted_seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), candidate, every, (f"--steps={steps}",))
        verdicts = judge(Path(folder))
    equal = [each for each in verdicts if each["outcome"] == "equal"]
    for each in verdicts:
        _report(f"{candidate}, clean, steps {each['after'] + 1} to {each['last']}: {_text(each)}")
    return {
        "planted": len(chosen),
        "named": named,
        "clean": sum(len(each["compared_steps"]) for each in equal),
        "alarms": sum(each["outcome"] == "different" for each in verdicts),
        "not judged": sum(each["outcome"] == "not judged" for each in verdicts),
        "seconds": time.perf_counter() - began,
        "planted seconds": planted_seconds,
    }


def train(
    folder: Path,
    driver: str,
    every: int,
    words: tuple[str, ...],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Train a run in `folder` with a checkpoint every few steps, of which all are kept."""
    settings = {
        "global_batch": BATCH,
        "log_every": 1,
        "checkpoint.every": every,
        "checkpoint.keep_last": 99,
    }
    command = [sys.executable, "-m", "drivetrain.cli", "train", str(RECIPE), "--out=run"]
    command += [*DRIVERS[driver].words, *(f"--set={k}={v}" for k, v in settings.items()), *words]
    _run(command, folder, (0,), environment)


def judge(folder: Path) -> list[dict[str, Any]]:
    """Return a witness's verdict on each stretch of the run in `folder`."""
    command = [sys.executable, "-m", "drivetrain.cli", "witness", "run", "--json"]
    return [json.loads(line) for line in _run(command, folder, (0, 1)).splitlines()]


def _run(
    command: list[str],
    folder: Path,
    codes: tuple[int, ...],
    environment: Mapping[str, str] | None = None,
) -> str:
    full = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(
        command, cwd=folder, env=full, capture_output=True, text=True, check=False
    )
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def _show(driver: str, plant: Plant, expected: Expected, verdict: Mapping[str, Any]) -> None:
    found = "named" if is_named(expected, verdict) else f"NOT NAMED ({expected})"
    _report(f"{driver}, {plant.target}, {plant.kind}, {plant}: {found}: {_text(verdict)}")


def _text(verdict: Mapping[str, Any]) -> str:
    if verdict["outcome"] == "not judged":
        return f"not judged: {verdict['reason']}"
    seconds = f"{verdict['seconds']} s"
    if verdict["outcome"] == "equal":
        return f"equal in {len(verdict['compared_steps'])} steps, {seconds}"
    return f"{verdict['texts'][0]}, {seconds}"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


BENCHMARKS = [
    Benchmark(
        "corruptions",
        "Corruptions that a witness names, of those that were planted",
        f"A run of {EACH * STRETCH} steps on each driver has a corruption in each stretch of "
        f"{STRETCH} steps between two checkpoints: a bit, several bits or a stripe is flipped in a "
        "weight, a gradient, a moment or a sample. Named: the verdict of `drivetrain witness` "
        "begins with the step, the tensor and, where ranks hold parts, the rank (of a sample: its "
        "place in the global batch, and who reads it). On ddp all ranks get the flip, since a run "
        "whose copies of weights differ ends by itself. Clean: logged steps of a second run, with "
        "dropout and shuffled data, that were trained again and are equal bit for bit; an alarm is "
        "a stretch of it that was called different. The seconds are those of both runs and of "
        "training them again. See [a witness](guides/replay.md#a-witness).",
        {name: driver.title for name, driver in DRIVERS.items()},
        measure,
        (
            Column("planted", "planted", digits=0),
            Column("named", "named", digits=0),
            Column("clean steps", "clean", digits=0),
            Column("alarms in clean steps", "alarms", digits=0),
            Column("stretches not judged", "not judged", digits=0),
            Column("seconds", "seconds", digits=0),
        ),
        plotted="named",
        needs={"zero-3": "deepspeed"},
    )
]
