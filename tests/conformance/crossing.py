"""One run saves in the middle and continues; runs on any driver and world size resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint import CheckpointReader
from ..kernel.errors import CapabilityRefused
from ..kernel.recipe import Recipe
from ..trainer.setting_values import override
from ..trainer.settings import Settings
from .bench import Bench
from .judge import require, require_close, require_same, require_same_bits
from .problems import PROBLEMS
from .runs import run
from .state import State, assemble, pieces, read_all
from .subject import Subject

__all__ = ["TRAININGS", "Crossing", "Saved", "Training", "crossing", "refusal", "save", "title"]

SAMPLES = 22
SAVED_AT = 4
"""A step of the second epoch, which has three updates like the first."""
STEPS = SAVED_AT + 10

SETTINGS: Mapping[str, Any] = {
    "steps": STEPS,
    "global_batch": 8,
    "micro_batch": 4,
    "log_every": 1,
    "optimizer.lr": 0.01,
}


@dataclass(frozen=True)
class Training:
    """Settings of one matrix, and the deviation that it allows."""

    settings: Mapping[str, Any]
    """Settings by name."""
    bound: float
    """The largest relative deviation allowed for each of the next ten losses."""
    problem: str = "language"
    """Name in `PROBLEMS`; here tied weights, fused layers, and items that are not samples."""


CLOSE = 1e-6
"""Bound in float32. The same weights see the same samples, summed in another order: a few units of
the last place, 6e-8, which ten updates enlarge little.
"""
PARTITIONED = 1e-5
"""Bound where layers, sequences and experts are partitioned. Each product is summed in another
order, too, and a difference of one unit can reverse an update of AdamW.
"""
ROUNDED = 2.0**-8
"""Bound in bf16. Weights and moments are as equal as in float32, but each product is rounded to 8
bits, an error of 2**-8 at most. Drivers round differently: by what they cast, and by the order in
which kernels sum. Rounding goes up as often as down and the loss is a mean over many items, so that
the error of a single product is ample.
"""

TRAININGS: Mapping[str, Training] = {
    "AdamW": Training({"optimizer.name": "torch.optim.AdamW"}, CLOSE),
    "SGD with momentum": Training(
        {"optimizer.name": "torch.optim.SGD", "optimizer.args.momentum": 0.9}, CLOSE
    ),
    "Adafactor": Training({"optimizer.name": "torch.optim.Adafactor"}, CLOSE),
    "AdamW in bf16": Training(
        {"optimizer.name": "torch.optim.AdamW", "precision": "bf16"}, ROUNDED
    ),
    "AdamW, mixture of experts": Training(
        {"optimizer.name": "torch.optim.AdamW"}, PARTITIONED, "mixture"
    ),
}


@dataclass(frozen=True)
class Saved:
    """A run that saved at `SAVED_AT` and continued to its end."""

    writer: str
    training: str
    checkpoint: str
    reported: dict[str, Any]
    state: State


@dataclass(frozen=True)
class Crossing:
    """Result of a resume: its deviations, or `refused`, or the `error` that says what is broken."""

    writer: str
    reader: str
    training: str
    next_loss: float = 0.0
    """Relative deviation of the first loss after resuming."""
    ten_losses: float = 0.0
    """The largest relative deviation of the first ten losses."""
    refused: str = ""
    error: str = ""


def title(subject: Subject) -> str:
    """Name the driver, its world size and its options."""
    options = "".join(f" {key}={value}" for key, value in subject.options.items())
    return f"{subject.backend} x{subject.world}{options}"


def refusal(subject: Subject, training: str) -> str:
    """Return the reason why the driver refuses that training, or an empty string."""
    answers: list[str] = subject.run(declined, training=training)
    require_same(f"refusals of {training} by the ranks", answers, answers[:1] * len(answers))
    return answers[0]


def save(writer: Subject, folder: str, training: str) -> Saved:
    """Train on `writer`, saving on the way to `folder`. Raises `WorkerFailure`."""
    saving = {"checkpoint.every": SAVED_AT, "checkpoint.keep_last": STEPS}
    reported = _run(writer, training, saving, out=folder)
    source = reported["checkpoint"].replace(f"{STEPS:06}", f"{SAVED_AT:06}")
    return Saved(title(writer), training, source, reported, read_all(CheckpointReader(source)))


def crossing(saved: Saved, reader: Subject) -> Crossing:
    """Resume on `reader`. Raises `LawBroken` unless weights and moments are bit-equal, steps,
    samples and learning rates the same, tied weights tied, and losses near."""
    source, training = saved.checkpoint, saved.training
    ranks = reader.run(restored, source=source, training=training)
    state = assemble([rank["state"] for rank in ranks])
    for kind in ("weights", "optimizer"):
        what = f"{kind} written by {saved.writer}, restored by {title(reader)}"
        require_same_bits(what, state[kind], saved.state[kind])
    require(all(rank["tied"] for rank in ranks), "tied weights are not one after restoring")
    reported = _run(reader, training, {}, resume=source)
    what = f"written by {saved.writer}, resumed by {title(reader)}"
    require_same(f"samples of each step, {what}", reported["ids"], saved.reported["ids"][SAVED_AT:])
    resumed, straight = reported["logged"], saved.reported["logged"][SAVED_AT:]
    for figure in ("step", "learning_rate"):
        seen, right = ([line[figure] for line in lines] for lines in (resumed, straight))
        require_same(f"{figure}, {what}", seen, right)
    actual, expected = ([line["loss"] for line in lines] for lines in (resumed, straight))
    require_close(f"losses, {what}", actual, expected, TRAININGS[training].bound)
    off = [abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True)]
    return Crossing(saved.writer, title(reader), training, off[0], max(off))


def _run(
    subject: Subject, training: str, saving: Mapping[str, Any], **arguments: Any
) -> dict[str, Any]:
    chosen = TRAININGS[training]
    settings = {**SETTINGS, **chosen.settings, **saving}
    ranks = subject.run(
        run, problem=chosen.problem, samples=SAMPLES, settings=settings, **arguments
    )
    steps = zip(*(rank["ids"] for rank in ranks), strict=True)
    ids = [sorted({index for part in step for index in part}) for step in steps]
    return {**ranks[0], "ids": ids}


def _settings(training: str) -> Settings:
    return override(Settings(), TRAININGS[training].settings)


def _recipe(training: str, settings: Settings) -> Recipe:
    return PROBLEMS[TRAININGS[training].problem].recipe(optimizer=settings.optimizer.build)


# --- jobs, run on every rank ------------------------------------------------------------------


def declined(bench: Bench, *, training: str) -> str:
    """Job that prepares the training, and returns the words of its refusal, or an empty string."""
    settings = _settings(training)
    try:
        with bench.open(precision=settings.precision) as session:
            session.prepare(_recipe(training, settings))
    except CapabilityRefused as refused:
        return str(refused)
    return ""


def restored(bench: Bench, *, source: str, training: str) -> dict[str, Any]:
    """Job that restores; returns the state that this rank would save, and whether ties hold."""
    settings = _settings(training)
    with bench.open(precision=settings.precision) as session:
        engine = session.prepare(_recipe(training, settings))
        engine.restore(CheckpointReader(source))
        return {"state": pieces(engine), "tied": len(engine.tied) == 1}
