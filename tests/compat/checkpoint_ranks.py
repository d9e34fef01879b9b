"""A job of two ranks: evaluate, train, save and resume; what each of them found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from built_alike import Classifier, Side, accuracy, losses, ours, samples, without_times
from torch import Tensor, nn

from drivetrain.compat import Trainer, TrainingArguments
from drivetrain.conformance.bench import Bench


class Wide(nn.Module):
    """Outputs as wide as the largest sample of the batch; some that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = x[:, None] * torch.ones(int(x.max())) * self.weight
        return {"loss": logits.mean(), "logits": logits}


class Overriding(Trainer):
    """It adds to clipping, saving and loading."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        return float(super()._get_grad_norm(model, grad_norm=grad_norm)) + 100

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"mine-{self.args.process_index}.txt").write_text("put")
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)


def overridden(folder: Path, **changes: Any) -> dict[str, Any]:
    """A whole run of that, and one that is resumed."""
    side = Side(Overriding, TrainingArguments, folder)
    whole = side.trainer(train_dataset=samples(24), **changes)
    whole.train()
    again = side.trainer(train_dataset=samples(24), **{**changes, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    norms = [entry["grad_norm"] for entry in whole.state.log_history if "grad_norm" in entry]
    return {"losses": losses(whole), "resumed": losses(again), "norms": norms}


def everything(bench: Bench, *, out: str) -> dict[str, Any]:
    """All of it, in one process group."""
    found: dict[str, Any] = {}
    folder = Path(out)
    side = ours(folder)
    driver: dict[str, Any] = {"backend": bench.backend}
    trainer = side.trainer(compute_metrics=accuracy, **driver)
    output = trainer.predict(samples(11))
    found["predictions"] = [output.predictions.tolist(), output.label_ids.tolist()]
    found["metrics"] = without_times(output.metrics)
    if bench.backend == "ddp":
        wide = [{"x": torch.tensor(float(n)), "labels": torch.tensor(n)} for n in (2, 3, 1, 4, 5)]
        output = side.trainer(Wide, **driver, per_device_eval_batch_size=2).predict(wide)
        found["wide"] = [output.predictions.tolist(), output.label_ids.tolist()]
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **driver}
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = side.trainer(lambda: Classifier(dropout=0.2), **saving, **best)
    trainer.train()
    found["losses"] = losses(trainer)
    found["evaluations"] = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    found["best"] = trainer.state.best_model_checkpoint
    trainer.save_model(str(folder / "saved"))
    again = side.trainer(lambda: Classifier(dropout=0.2), **{**saving, "save_strategy": "no"})
    torch.manual_seed(7)
    again.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
    found["resumed"] = losses(again)
    every_step = {**saving, "save_steps": 1, "output_dir": str(folder / "plain")}
    plain = side.trainer(train_dataset=samples(24), **every_step)
    plain.train()
    found["plain"] = losses(plain)
    found["overridden"] = overridden(folder / "overridden", **saving)
    from_theirs = side.trainer(train_dataset=samples(24), **{**saving, "save_strategy": "no"})
    from_theirs.train(resume_from_checkpoint=str(folder / "theirs" / "checkpoint-2"))
    found["from theirs"] = losses(from_theirs)
    trainer.end()
    plain_values: dict[str, Any] = json.loads(json.dumps(found))
    return plain_values
