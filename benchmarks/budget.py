"""A guard: counts that noise cannot move, held to what was committed.

    python -m benchmarks.budget            compare with benchmarks/budget.json; 1 if a count is over
    python -m benchmarks.budget --update   write there what differs by more than the slack

A time on a shared machine says little; what it is made of does not vary: Python functions called
and tensor operations in a step, values handed from the device to the host, files opened and bytes
read to resume, modules imported. A change that raises one either is mended, or says why and
updates the budget.

All counts may vary by `SLACK`, so that a function can be split in two. Where torch's or
transformers' own work is among what is counted, the tuned loop's count in the same process is taken
off it, and what is left may vary by a count a step besides: the next torch may do the same in other
calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

BUDGET = Path(__file__).with_name("budget.json")
SLACK = 0.05
EXACT = ("own calls", "files opened", "values fetched", "modules of drivetrain")
STEPS, LOG_EVERY = 20, 10

Counts = dict[str, int]


# --- counting -----------------------------------------------------------------------------------


def count() -> Counts:
    """Everything, in this process, one that only imports, and two ranks."""
    counts = imports() | of_loops(accumulation=1) | of_loops(accumulation=4) | of_ranks()
    for name in RESUMED:
        counts |= {f"{name}, resuming: {what}": n for what, n in of_resuming(name).items()}
    return dict(sorted(counts.items()))


def of_loops(accumulation: int, where: str = "") -> Counts:
    """Count training with the kernel and with compat, alone and above the tuned loop's counts."""
    import torch

    from .problems import MLP

    torch.set_num_threads(1)
    problem = dataclasses.replace(MLP, log_every=LOG_EVERY)
    tuned = of_steps("tuned", problem, accumulation)
    counts: Counts = {}
    for name in ("kernel", "compat"):
        reported = of_steps(name, problem, accumulation)
        what = f"{name}, {STEPS} steps and 2 logs, {where}accumulation {accumulation}"
        counts[f"{what}: own calls"] = reported["own"]
        counts[f"{what}: calls above tuned"] = reported["calls"] - tuned["calls"]
        operations = reported["operations"] - tuned["operations"]
        counts[f"{what}: tensor operations above tuned"] = operations
        counts[f"{what}: values fetched"] = reported["waits"]
    return counts


def of_ranks() -> Counts:
    """Count the same on two ranks of DDP; the counts are the first rank's."""
    from .harness import torchrun

    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(2, folder), "-m", "benchmarks.budget", "--as-rank"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    counts: Counts = json.loads(done.stdout.splitlines()[-1])
    return counts


def of_steps(name: str, problem: Any, accumulation: int) -> Counts:
    """Count `STEPS` steps: the difference between a long run and a short one."""
    from .counting import Operations, calls
    from .trainers import TRAINERS

    def train(steps: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            TRAINERS[name](problem, steps, accumulation)

    def both(steps: int) -> Counts:
        with calls() as counted:
            train(steps)
        with _as_on_an_accelerator(), Operations() as operations:
            train(steps)
        return {
            "own": counted.own,
            "calls": counted.all,
            "operations": operations.all,
            "waits": operations.waits,
        }

    train(STEPS)  # what is imported, compiled or cached at first
    short, long = both(STEPS), both(2 * STEPS)
    return {what: long[what] - short[what] for what in long}


@contextlib.contextmanager
def _as_on_an_accelerator() -> Iterator[None]:
    """Host tensors take the path of a device's, where the host must not wait for a step."""
    from drivetrain.backends.common import stepping

    def on_device(*arguments: Any) -> Any:
        return stepping._step_on_device(*arguments)

    before = stepping.step_if_finite, stepping.fetch_flag
    stepping.step_if_finite = on_device
    stepping.fetch_flag = lambda flag: lambda: True  # stands for the copy behind the queue
    try:
        yield
    finally:
        stepping.step_if_finite, stepping.fetch_flag = before


def of_resuming(name: str) -> Counts:
    """A run of two steps, that is resumed when it has finished: nothing is left to train."""
    from .counting import reads

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        run = RESUMED[name](folder)
        run(False)
        run(True)  # what is imported or cached at first
        with reads(folder) as count:
            run(True)
        return {"files opened": count.opened.total(), "bytes read": count.bytes}


def _resumed_kernel(folder: Path) -> Callable[[bool], None]:
    from drivetrain import Recipe, Settings
    from drivetrain.trainer.fit import fit

    from .problems import Mlp, Rows, collate, summed_error

    recipe = Recipe(Mlp, summed_error, Rows(), collate=collate)

    def run(resume: bool) -> None:
        settings = Settings(steps=2, global_batch=8)
        fit(recipe, settings, backend="cpu", out=folder, resume="auto" if resume else None)

    return run


def _resumed_compat(folder: Path) -> Callable[[bool], None]:
    from drivetrain.compat import Trainer, TrainingArguments

    from .problems import Mlp, Rows, collate

    def run(resume: bool) -> None:
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = Trainer(model=Mlp(), args=args, train_dataset=Rows(), data_collator=collate)
            trainer.train(resume_from_checkpoint=resume)

    return run


RESUMED: dict[str, Callable[[Path], Callable[[bool], None]]] = {
    "kernel": _resumed_kernel,
    "compat": _resumed_compat,
}


def imports() -> Counts:
    """Modules loaded beside those of torch."""
    script = """
import json, sys
import torch
found, before = {}, set(sys.modules)
from drivetrain import Recipe, Settings
from drivetrain.trainer.fit import fit
found["drivetrain, fit"] = sorted(set(sys.modules) - before)
import drivetrain.compat
found["drivetrain.compat"] = sorted(set(sys.modules) - before)
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    counts: Counts = {}
    for room, names in json.loads(done.stdout.splitlines()[-1]).items():
        own = sum(name.partition(".")[0] == "drivetrain" for name in names)
        counts[f"import of {room}: modules of drivetrain"] = own
        counts[f"import of {room}: other modules"] = len(names) - own
    return counts


# --- comparing ----------------------------------------------------------------------------------


def over(counts: Counts, budget: Counts) -> list[str]:
    """A line for each count that is more than its budget allows, or that only one of them has."""
    lines = [f"{name}: counted, and not in the budget" for name in counts.keys() - budget.keys()]
    lines += [f"{name}: in the budget, and not counted" for name in budget.keys() - counts.keys()]
    for name in counts.keys() & budget.keys():
        slack = int(SLACK * abs(budget[name])) + (0 if name.endswith(EXACT) else STEPS)
        if counts[name] > budget[name] + slack:
            more = counts[name] - budget[name]
            lines.append(f"{name}: {counts[name]}, and was {budget[name]} ({more:+d})")
    return sorted(lines)


def updated(counts: Counts, budget: Counts) -> Counts:
    """Return the counts, and the budget's number where both are within the slack of the other."""

    def is_alike(name: str) -> bool:
        new, old = {name: counts[name]}, {name: budget[name]}
        return not over(new, old) and not over(old, new)

    return {
        name: budget[name] if name in budget and is_alike(name) else counts[name] for name in counts
    }


def main(
    update: Annotated[bool, typer.Option(help="Write what differs into the budget.")] = False,
    budget: Annotated[Path, typer.Option(help="The file of the budget.")] = BUDGET,
    as_rank: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Compare what is counted with the budget."""
    if as_rank:
        counts = of_loops(accumulation=1, where="2 ranks, ")
        if os.environ["RANK"] == "0":
            print(json.dumps(counts))
        return
    counts = count()
    committed = json.loads(budget.read_text()) if budget.exists() else {}
    if update:
        budget.write_text(json.dumps(updated(counts, committed), indent=1) + "\n")
        return
    for name, number in counts.items():
        was = committed.get(name)
        print(
            f"{number:9d}  {name}" + (f"  ({number - was:+d})" if was not in (None, number) else "")
        )
    if lines := over(counts, committed):
        print("over the budget:\n  " + "\n  ".join(lines), file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
