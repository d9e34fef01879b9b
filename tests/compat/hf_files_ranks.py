"""A job of two ranks whose driver shards the optimizer: HF's files of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from side_by_side import arguments, llama, losses, sentences

from drivetrain import compat
from drivetrain.conformance.bench import Bench

ASKED: dict[str, Any] = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "weight_decay": 0.1,
    "learning_rate": 0.01,
    "per_device_train_batch_size": 2,
}


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


MODELS = {"whole": llama, "adapters": adapted}
CASES = {"stage 3": (3, "whole"), "adapters at stage 2": (2, "adapters")}


def trainer(library: Any, model: str, folder: Path, **changes: Any) -> Any:
    args = arguments(library, folder, **{**ASKED, **changes})
    return library.Trainer(MODELS[model](), args, train_dataset=sentences(16))


def write(bench: Bench, *, out: str) -> dict[str, list[float]]:
    """Return the losses of each case, which saves HF's files, and the losses after a resume from
    these.
    """
    found = {}
    for name, (stage, model) in CASES.items():
        driver: Any = {"backend": "deepspeed", "backend_options": {"stage": stage}}
        written = trainer(compat, model, Path(out, name), checkpoint_format="hf", **driver)
        written.train()
        found[name] = losses(written)
        again = trainer(compat, model, Path(out, "again"), **{**driver, "save_strategy": "no"})
        again.train(resume_from_checkpoint=str(Path(out, name, "checkpoint-2")))
        found[f"{name} resumed"] = losses(again)
        again.end()
        written.end()
    return found


def resume(bench: Bench, *, model: str, checkpoint: str, out: str) -> list[float]:
    """Return the losses of a run that resumes from a checkpoint."""
    asked: Any = {"backend": bench.backend, "save_strategy": "no"}
    again = trainer(compat, model, Path(out, "on two"), **asked)
    again.train(resume_from_checkpoint=checkpoint)
    again.end()
    return losses(again)
