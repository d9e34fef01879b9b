"""Subclasses with their own training loop, or their own loading of optimizer and random state."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from side_by_side import Classifier, both, losses
from torch import nn

from drivetrain import compat

STEPS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 5,
    "gradient_accumulation_steps": 2,
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
DROPPING = partial(Classifier, dropout=0.2)
COPIED = ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch")


def of(kind: Any, side: Any, **changes: Any) -> Any:
    """Return a Trainer of that library, whose class derives from the given one."""
    return type(side)(kind, side.arguments_type, side.folder).trainer(
        DROPPING, **{**STEPS, **changes}
    )


class CopiedLoop(compat.Trainer):
    """HF's own loop, as users copy it in order to change it."""


for _name in (*COPIED, "_update_auto_batch_size"):
    setattr(CopiedLoop, _name, vars(transformers.Trainer)[_name])


class PlainLoop(compat.Trainer):
    """A loop by hand, with the methods of a Trainer that such loops call."""

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        loader = self.get_train_dataloader()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.learning_rate)
        self.create_scheduler(num_training_steps=args.max_steps)
        self.state.max_steps, self.state.num_train_epochs = args.max_steps, 1
        self.state.compute_steps(args, args.max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        total = torch.tensor(0.0)
        for step, inputs in zip(range(1, args.max_steps + 1), loader, strict=False):
            total += self.training_step(self.model, inputs)
            self.accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.model.zero_grad()
            self.state.global_step, self.state.epoch = step, step / len(loader)
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            self._maybe_log_save_evaluate(total, None, self.model, trial, 0, None, 0.0)
        return self._finalize_training(trial, 1, 0.0)


# --- loops --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.row("L18", "C38")
def test_their_own_loop_copied_runs_and_saves(tmp_path: Path) -> None:
    """Require that both libraries resume from the copied loop's checkpoint, and the loop from the
    kernel's.
    """
    ours, theirs = both(tmp_path)
    whole = of(theirs.trainer_type, theirs)
    whole.train()
    mine = of(CopiedLoop, ours)
    mine.train()
    assert losses(mine) == losses(whole)
    assert sorted(path.name for path in (ours.folder / "checkpoint-2").iterdir()) == sorted(
        path.name.replace("training_args.bin", "training_args.json")
        for path in (theirs.folder / "checkpoint-2").iterdir()
    )
    kernels = type(ours)(compat.Trainer, ours.arguments_type, tmp_path / "kernel")
    of(compat.Trainer, kernels).train()
    for kind, folder in (
        (CopiedLoop, ours.folder),
        (compat.Trainer, ours.folder),
        (CopiedLoop, kernels.folder),
    ):
        assert resumed(kind, ours, folder) == losses(whole), (kind, folder)
    in_theirs = partial(resumed, theirs.trainer_type, theirs)
    assert in_theirs(ours.folder) == in_theirs(theirs.folder)


def resumed(kind: Any, side: Any, folder: Path) -> list[float]:
    again = of(kind, side, save_strategy="no")
    torch.manual_seed(99)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return losses(again)


@pytest.mark.row("L18")
def test_a_loop_by_hand_logs_and_saves(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    trainer = of(PlainLoop, ours, **EVALUATED)
    output = trainer.train()
    logged = losses(trainer)
    assert len(logged) == 5 and output.training_loss == pytest.approx(sum(logged) / 5)
    assert (ours.folder / "checkpoint-4" / "optimizer.pt").is_file()
    before = torch.load(ours.folder / "checkpoint-4" / "scheduler.pt", weights_only=True)
    again = of(PlainLoop, ours)
    again.train(resume_from_checkpoint=str(ours.folder / "checkpoint-4"))
    assert again.lr_scheduler.last_epoch == before["last_epoch"] + 5 == 9
    of(compat.Trainer, ours, max_steps=2).train()
    with pytest.raises(RuntimeError, match="cpu has not wrapped the model yet"):
        again.train(resume_from_checkpoint=str(ours.folder / "checkpoint-2"))


def test_what_a_loop_of_ones_own_cannot_do_is_refused(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    with pytest.raises(ValueError, match=r"PlainLoop\._inner_training_loop, which does not call"):
        of(PlainLoop, ours, backend="deepspeed", backend_options={"device": "cpu"})
    for name, value in {"run_records": True, "replay_step": 2, "stats_steps": 1}.items():
        with pytest.raises(ValueError, match=f"refuses {name}={value} beside PlainLoop"):
            of(PlainLoop, ours, **{name: value})


@pytest.mark.row("K1")
def test_a_checkpoint_outside_of_training(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    trainer = of(compat.Trainer, ours)
    trainer._save_checkpoint(trainer.model, None)
    trainer.train()
    trainer._save_checkpoint(trainer.model, None)
    assert (ours.folder / "checkpoint-0" / "model.safetensors").is_file()
    again = of(compat.Trainer, ours, max_steps=6)
    assert again.train(resume_from_checkpoint=str(ours.folder / "checkpoint-5")).global_step == 6


# --- loading ------------------------------------------------------------------------------------


def own_loading(base: Any) -> Any:
    """Return a Trainer that reads HF's files itself."""

    class Own(base):  # type: ignore[misc]
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            if checkpoint is not None:
                read = partial(torch.load, weights_only=True)
                self.optimizer.load_state_dict(read(Path(checkpoint, "optimizer.pt")))
                self.lr_scheduler.load_state_dict(read(Path(checkpoint, "scheduler.pt")))

        def _load_rng_state(self, checkpoint: str | None) -> None:
            if checkpoint is None:
                return
            with transformers.trainer.safe_globals():
                states = torch.load(Path(checkpoint, "rng_state.pth"), weights_only=True)
            random.setstate(states["python"])
            np.random.set_state(states["numpy"])
            torch.random.set_rng_state(states["cpu"])

    return Own


@pytest.mark.row("C38", "K11")
def test_a_subclass_that_loads_by_itself_finds_the_files(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    whole = of(own_loading(compat.Trainer), ours)
    whole.train()
    names = {path.name for path in (ours.folder / "checkpoint-2").iterdir()}
    assert names >= {"manifest.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    for kind in (own_loading(compat.Trainer), compat.Trainer):
        assert resumed(kind, ours, ours.folder) == losses(whole)


@pytest.mark.row("C38", "K11")
def test_a_subclass_that_adds_to_loading_gets_no_pickles(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Adding(compat.Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            Path(output_dir, "mine.txt").write_text("mine")

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                seen.append(Path(checkpoint, "mine.txt").read_text())
                seen.append(bool(self.optimizer.state))

        def _load_rng_state(self, checkpoint: str | None) -> None:
            compat.Trainer._load_rng_state(self, checkpoint)

    ours, _ = both(tmp_path)
    whole = of(Adding, ours)
    whole.train()
    assert not list(ours.folder.rglob("*.p*t*"))
    assert resumed(Adding, ours, ours.folder) == losses(whole)
    assert seen == ["mine", True]


@pytest.mark.row("C38")
def test_a_subclass_that_loads_nothing_starts_over(tmp_path: Path) -> None:
    """Require the same as from transformers: the weights are resumed, the optimizer starts over."""
    found = []
    for side in both(tmp_path):

        class Nothing(side.trainer_type):  # type: ignore[misc, name-defined]
            def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
                pass

            def _load_rng_state(self, checkpoint: str | None) -> None:
                torch.manual_seed(7)

        of(side.trainer_type, side).train()
        again = of(Nothing, side, save_strategy="no")
        again.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
        rates = [log["learning_rate"] for log in again.state.log_history if "loss" in log]
        found.append((losses(again), rates))
    assert found[0] == found[1]


@pytest.mark.row("C38", "K20")
def test_weights_that_a_subclass_loads_itself_count(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):

        class Halved(side.trainer_type):  # type: ignore[misc, name-defined]
            def _load_from_checkpoint(
                self, resume_from_checkpoint: str, model: nn.Module | None = None
            ) -> None:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.fill_(0.5)

        of(side.trainer_type, side).train()
        again = of(Halved, side, save_strategy="no")
        again.train(resume_from_checkpoint=str(side.folder / "checkpoint-4"))
        found.append(losses(again))
    assert found[0] == found[1]


def test_loading_by_oneself_is_refused_where_states_lie_in_parts(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    changes = {"backend": "fsdp", "backend_options": {"device": "cpu"}}
    with pytest.raises(ValueError, match=r"Own\._load_optimizer_and_scheduler, which does not"):
        of(own_loading(compat.Trainer), ours, **changes)
