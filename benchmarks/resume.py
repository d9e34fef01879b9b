"""Time from the call to the first step after resuming, at the start of an epoch and deep in it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .harness import Benchmark, Column, Measured
from .problems import FEATURES, Batch, Mlp, collate

BATCH, DEEP = 8, 0.9


class Many(torch.utils.data.Dataset[Batch]):
    """Every sample is the same, so that any number of them takes no memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.one = {"inputs": torch.ones(FEATURES), "labels": torch.ones(1)}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return self.one


class Stopwatch:
    """Seconds to the end of the first step."""

    def __init__(self) -> None:
        self.started, self.seconds = time.perf_counter(), 0.0

    def stop(self) -> None:
        self.seconds = self.seconds or time.perf_counter() - self.started


# --- candidates: `run(folder, resume)` trains one step and returns seconds ------------------------

Run = Callable[[Path, bool], float]


def kernel(length: int, workers: int = 0) -> tuple[Run, Callable[[Path, int], None]]:
    from drivetrain import CheckpointSettings, DataSettings, Recipe, Settings
    from drivetrain.kernel.events import Request, StepEnded
    from drivetrain.trainer.fit import fit

    recipe = Recipe(Mlp, lambda m, b: m(**b)["loss"] * BATCH, Many(length), collate=collate)

    def run(folder: Path, resume: bool) -> float:
        watch = Stopwatch()

        def observe(event: Any) -> Request | None:
            if isinstance(event, StepEnded):
                watch.stop()
                return Request.STOP
            return None

        settings = Settings(
            epochs=2,
            global_batch=BATCH,
            data=DataSettings(workers=workers),
            checkpoint=CheckpointSettings(at_end=not resume),
        )
        source = "auto" if resume else None
        fit(recipe, settings, backend="cpu", out=folder, resume=source, observers=[observe])
        return watch.seconds

    def move(folder: Path, samples: int) -> None:
        (path,) = folder.glob("checkpoints/*/manifest.json")
        _move_manifest(path, samples)

    return run, move


def compat(length: int) -> tuple[Run, Callable[[Path, int], None]]:
    from drivetrain.compat import Trainer, TrainerCallback, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, TrainerCallback, length)


def hugging_face(length: int) -> tuple[Run, Callable[[Path, int], None]]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    return _as_transformers(Trainer, TrainingArguments, TrainerCallback, length)


def _as_transformers(
    trainer: Any, arguments: Any, callback: Any, length: int
) -> tuple[Run, Callable[[Path, int], None]]:
    def run(folder: Path, resume: bool) -> float:
        watch = Stopwatch()

        class Observe(callback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
                watch.stop()
                control.should_training_stop, control.should_save = True, not resume
                return control

        args = arguments(
            output_dir=str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer(
                model=Mlp(),
                args=args,
                train_dataset=Many(length),
                data_collator=collate,
                callbacks=[Observe()],
            ).train(resume_from_checkpoint=str(folder / "checkpoint-1") if resume else None)
        return watch.seconds

    def move(folder: Path, samples: int) -> None:
        for path in folder.rglob("manifest.json"):
            _move_manifest(path, samples)
        for path in folder.rglob("trainer_state.json"):
            state = json.loads(path.read_text())
            path.write_text(json.dumps(state | {"global_step": samples // BATCH}))

    return run, move


def _move_manifest(path: Path, samples: int) -> None:
    """Edit the saved position, so that `samples` of the epoch count as trained on."""
    from drivetrain.checkpoint import read_manifest
    from drivetrain.checkpoint.manifest import write_manifest

    manifest = read_manifest(path.parent)
    state = json.loads(json.dumps(dict(manifest.state)))
    state["position"]["samples"] = samples
    if "trainer_state.json" in os.listdir(path.parent.parent):  # it counts steps
        state["step"] = state["applied"] = samples // BATCH
    path.unlink()
    write_manifest(path.parent, dataclasses.replace(manifest, state=state))


CANDIDATES: dict[str, Callable[[], tuple[Run, Callable[[Path, int], None], int]]] = {
    f"{name}_{length:.0e}".replace("+0", ""): partial(lambda m, n: (*m(n), n), make, length)
    for name, make, length in (
        ("kernel", kernel, 10**6),
        ("kernel", kernel, 10**9),
        ("kernel_workers", partial(kernel, workers=2), 10**6),
        ("compat", compat, 10**6),
        ("hugging_face", hugging_face, 10**6),
    )
}


def measure(candidate: str, quick: bool) -> Measured:
    run, move, length = CANDIDATES[candidate]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(folder, False)
        run(folder, True)  # imports, and what is compiled or cached at first
        shallow = run(folder, True)
        move(folder, int(length * DEEP) // BATCH * BATCH)
        deep = run(folder, True)
    return {"shallow": shallow, "deep": deep, "more": deep - shallow}


BENCHMARKS = [
    Benchmark(
        "resume",
        "Resuming deep in an epoch",
        "A tiny MLP on shuffled samples, batch 8: seconds from the call, in a process that has "
        "done it once, to the end of the first step after resuming at the first step, and after "
        "nine tenths of the epoch. HF Trainer, and compat, which keeps its order of samples, "
        "write the order of an epoch down, and so are not asked for 10⁹ samples.",
        {
            "kernel_1e6": "drivetrain kernel, 10⁶ samples",
            "kernel_1e9": "drivetrain kernel, 10⁹ samples",
            "kernel_workers_1e6": "drivetrain kernel, 10⁶ samples, two workers",
            "compat_1e6": "drivetrain compat, 10⁶ samples",
            "hugging_face_1e6": "HF Trainer, 10⁶ samples",
        },
        measure,
        (
            Column("at the start, s", "shallow", digits=3),
            Column("deep, s", "deep", digits=3),
            Column("more, s", "more", digits=3),
        ),
        plotted="deep, s",
        needs={"hugging_face_1e6": "transformers"},
    )
]
