"""A job of two ranks: evaluate, train, save and resume; returns the results of each rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from side_by_side import (
    Classifier,
    Side,
    accuracy,
    arguments,
    llama,
    losses,
    ours,
    samples,
    sentences,
    without_times,
)
from test_compat_own_loop import CopiedLoop
from torch import Tensor, nn

from drivetrain import compat
from drivetrain.compat import Trainer, TrainerCallback, TrainingArguments
from drivetrain.conformance.bench import Bench


class Wide(nn.Module):
    """A model whose outputs are as wide as the largest sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = x[:, None] * torch.ones(int(x.max())) * self.weight
        return {"loss": logits.mean(), "logits": logits}


class Overriding(Trainer):
    """A Trainer that overrides clipping, saving and loading."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        return float(super()._get_grad_norm(model, grad_norm=grad_norm)) + 100

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"mine-{self.args.process_index}.txt").write_text("put")
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)


def continued(kind: type[Trainer], folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a whole run with that Trainer, and resume another one; return the losses of both."""
    side = Side(kind, TrainingArguments, folder)
    whole = side.trainer(train_dataset=samples(24), **changes)
    whole.train()
    again = side.trainer(train_dataset=samples(24), **{**changes, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    norms = [entry["grad_norm"] for entry in whole.state.log_history if "grad_norm" in entry]
    return {"losses": losses(whole), "resumed": losses(again), "norms": norms}


class Halves(TrainerCallback):
    """Halves the weights in each checkpoint, slowly, on the first rank alone."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "model.safetensors")
        if args.process_index == 0:
            time.sleep(0.3)
            save_file({name: each / 2 for name, each in load_file(path).items()}, path)


def edited(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the best model of a run whose checkpoints are edited, and the losses of a run that
    resumes from one.
    """
    side = Side(Trainer, TrainingArguments, folder)
    asked = {**changes, "eval_strategy": "steps", "load_best_model_at_end": True, "eval_steps": 2}
    data = samples(24)
    trainer = side.trainer(callbacks=[Halves], train_dataset=data, **asked)
    trainer.train()
    whole = trainer.accelerator.get_state_dict(trainer.model)
    again = side.trainer(train_dataset=data, **{**changes, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {
        "best": trainer.state.best_model_checkpoint,
        "weights": {name: each.tolist() for name, each in whole.items()},
        "resumed": losses(again),
    }


class Speaks(TrainerCallback):
    """Generates with the model during training, for more steps on one rank than on the other."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        ids = torch.ones(1, 2, dtype=torch.int64)
        more = 2 + args.process_index
        made = model.generate(ids, max_new_tokens=more, min_new_tokens=more, do_sample=False)
        self.lengths.append(made.shape[1])


def spoken(folder: Path, **driver: Any) -> list[int]:
    speaks = Speaks()
    args = arguments(compat, folder, max_steps=2, **driver)
    Trainer(llama(), args, train_dataset=sentences(), callbacks=[speaks]).train()
    return [length - args.process_index for length in speaks.lengths]


def smoothed(folder: Path, **driver: Any) -> list[float]:
    """Return the losses of a language model with smoothed labels, and the loss of its
    evaluation.
    """
    asked = {"max_steps": 2, "label_smoothing_factor": 0.2, "per_device_eval_batch_size": 2}
    args = arguments(compat, folder, **asked, **driver)
    given = {"train_dataset": sentences(), "eval_dataset": sentences(8)}
    trainer = Trainer(llama(), args, **given)
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


def everything(bench: Bench, *, out: str) -> dict[str, Any]:
    """A job: run all scenarios in one process group."""
    found: dict[str, Any] = {}
    folder = Path(out)
    side = ours(folder)
    driver: dict[str, Any] = {"backend": bench.backend}
    trainer = side.trainer(compute_metrics=accuracy, **driver)
    output = trainer.predict(samples(11))
    found["predictions"] = [output.predictions.tolist(), output.label_ids.tolist()]
    found["metrics"] = without_times(output.metrics)
    found["loss alone"] = side.trainer(**driver).evaluate(samples(11))["eval_loss"]
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
    found["overridden"] = continued(Overriding, folder / "overridden", **saving)
    found["edited"] = edited(folder / "edited", **saving)
    written = side.trainer(
        train_dataset=samples(24),
        **{**saving, "output_dir": str(folder / "hf"), "checkpoint_format": "hf"},
    )
    written.train()
    again = side.trainer(train_dataset=samples(24), **{**saving, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(folder / "hf" / "checkpoint-2"))
    found["from hf"] = losses(again)
    if bench.backend != "deepspeed":
        found["looped"] = continued(CopiedLoop, folder / "looped", **saving)
    found["spoken"] = spoken(folder / "spoken", **driver)
    found["smoothed"] = smoothed(folder / "smoothed", **driver)
    from_theirs = side.trainer(train_dataset=samples(24), **{**saving, "save_strategy": "no"})
    from_theirs.train(resume_from_checkpoint=str(folder / "theirs" / "checkpoint-2"))
    found["from theirs"] = losses(from_theirs)
    trainer.end()
    plain_values: dict[str, Any] = json.loads(json.dumps(found))
    return plain_values
