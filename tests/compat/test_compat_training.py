"""The training loop. Tests with `library` hold for transformers' Trainer, too."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import (
    LIBRARIES,
    Classifier,
    arguments,
    assert_same_history,
    assert_same_weights,
    classifier,
    llama,
    samples,
    sentences,
)
from torch import Tensor, nn
from transformers import default_data_collator

from drivetrain import compat


def trainer(library: Any, folder: Path, model: Any = None, kind: Any = None, **changes: Any) -> Any:
    """Return a Trainer, or one of a subclass; `given` are parameters of its constructor."""
    given = changes.pop("given", {})
    args = arguments(library, folder, **changes)
    model = classifier() if model is None else model
    data = samples() if isinstance(model, Classifier) else sentences()
    parameters = {"train_dataset": data, "eval_dataset": data[:3], **given}
    return (kind or library.Trainer)(model, args, **parameters)


def both(folder: Path, make: Any) -> tuple[Any, Any]:
    """Return a trained Trainer of each library; `make(library, folder)` builds them."""
    made = [make(library, folder / name) for name, library in LIBRARIES.items()]
    for each in made:
        each.train()
    return made[0], made[1]


def assert_same_runs(ours: Any, theirs: Any) -> None:
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    assert_same_weights(ours.model, theirs.model)
    assert ours.state.global_step == theirs.state.global_step
    assert ours.state.epoch == pytest.approx(theirs.state.epoch)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"num_train_epochs": 2},
    "accumulation": {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
    "evaluation": {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_steps": 2,
    },
    "bf16": {"max_steps": 5, "bf16": True},
    "smoothing": {
        "max_steps": 6,
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 3,
    },
    "no clipping": {"max_steps": 4, "max_grad_norm": 0.0},
    "hard clipping": {"max_steps": 4, "max_grad_norm": 0.01},
    "warm-up": {"max_steps": 6, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "start": {"max_steps": 2, "eval_on_start": True, "eval_strategy": "epoch"},
}


@pytest.mark.few(6)
@pytest.mark.row("L1", "L3", "L5", "L9", "L15", "S7", "S12", "P2")
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("model", [classifier, llama])
def test_losses_norms_rates_and_weights_are_theirs(
    tmp_path: Path, model: Any, changes: dict[str, Any]
) -> None:
    if model is classifier and "label_smoothing_factor" in changes:
        model = llama
    assert_same_runs(*both(tmp_path, lambda lib, at: trainer(lib, at, model(), **changes)))


@pytest.mark.row("N1", "N2", "W7")
@pytest.mark.parametrize("recomputed", [False, True])
def test_noise_is_drawn_as_theirs_also_where_activations_are_recomputed(
    tmp_path: Path, recomputed: bool
) -> None:
    changes = {"neftune_noise_alpha": 5.0, "activation_checkpointing": recomputed, "max_steps": 4}
    runs = []
    for name, lib in LIBRARIES.items():
        runs.append(trainer(lib, tmp_path / name, llama(), **changes))
        runs[-1].train()  # at once: construction seeded what is drawn from
    assert_same_runs(*runs)
    quiet = trainer(compat, tmp_path, llama(), max_steps=4)
    quiet.train()
    assert quiet.state.log_history[0]["loss"] != runs[0].state.log_history[0]["loss"]


@pytest.mark.row("L2")
@pytest.mark.parametrize(
    ("batches", "accumulation", "epochs", "steps"),
    [(5, 2, 1, 3), (5, 2, 2, 6), (5, 2, 0.5, 2), (4, 2, 1.5, 3), (3, 4, 1, 1)],
)
def test_the_number_of_updates(
    tmp_path: Path, library: Any, batches: int, accumulation: int, epochs: float, steps: int
) -> None:
    made = trainer(
        library,
        tmp_path,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        given={"train_dataset": samples(2 * batches)},
    )
    assert made.train().global_step == made.state.max_steps == steps


@pytest.mark.row("L4")
def test_the_batches_of_an_update_are_read_at_once(tmp_path: Path, library: Any) -> None:
    read: list[tuple[int, int | None]] = []

    class Reading(library.Trainer):
        def get_batch_samples(self, iterator: Any, count: int, device: Any) -> Any:
            batches, items = super().get_batch_samples(iterator, count, device)
            read.append((len(batches), None if items is None else int(items)))
            return batches, items

    made = trainer(
        library, tmp_path, llama(), Reading, gradient_accumulation_steps=3, num_train_epochs=1
    )
    made.train()
    assert [count for count, _ in read] == [3, 3, 1]
    learned = sum(int((each["labels"][1:] != -100).sum()) for each in sentences())
    assert sum(items for _, items in read if items) == learned


@pytest.mark.row("L6")
def test_the_logged_loss_is_what_the_steps_return(tmp_path: Path, library: Any) -> None:
    class Three(library.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return torch.full_like(super().training_step(*args, **kwargs), 3.0)

    made = trainer(
        library, tmp_path, kind=Three, max_steps=2, logging_steps=2, gradient_accumulation_steps=2
    )
    assert made.train().training_loss == pytest.approx(6.0)
    assert made.state.log_history[0]["loss"] == pytest.approx(6.0)


@pytest.mark.row("L7")
def test_a_training_step_by_hand(tmp_path: Path, library: Any) -> None:
    made = trainer(library, tmp_path, max_steps=2)
    made.train()
    made.model.eval()
    made.model.zero_grad()
    batch = made.data_collator(samples(2))
    loss = made.training_step(made.model, dict(batch))
    assert made.model.training
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(made.model(**batch)["loss"].detach()))
    assert all(each.grad is not None for each in made.model.parameters())


def test_a_layer_in_evaluation_mode_is_back_for_the_next_step(tmp_path: Path, library: Any) -> None:
    seen: list[bool] = []

    class Freezing(library.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            next(iter(kwargs["model"].children())).eval()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(all(part.training for part in kwargs["model"].modules()))

    trainer(library, tmp_path, max_steps=2, given={"callbacks": [Freezing()]}).train()
    assert seen == [True, True]


def test_a_models_own_train_is_called_for_each_batch(tmp_path: Path, library: Any) -> None:
    class Counting(Classifier):
        calls = 0

        def train(self, mode: bool = True) -> Any:
            self.calls += mode
            return super().train(mode)

    made = trainer(library, tmp_path, Counting(), max_steps=3, gradient_accumulation_steps=2)
    made.train()
    assert made.model.calls >= 6


@pytest.mark.row("L8", "L10")
def test_gradients_are_there_around_the_step_and_gone_after(tmp_path: Path, library: Any) -> None:
    seen: list[tuple[str, float]] = []

    def norm(model: nn.Module) -> float:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    class Norms(library.TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any, **kwargs: Any) -> None:
            seen.append(("begin", norm(model)))

        def on_pre_optimizer_step(self, *_: Any, model: Any, **kwargs: Any) -> None:
            seen.append(("before", norm(model)))

        def on_optimizer_step(self, *_: Any, model: Any, **kwargs: Any) -> None:
            seen.append(("after", norm(model)))

    given = {"callbacks": [Norms()]}
    trainer(library, tmp_path, max_steps=2, max_grad_norm=0.01, given=given).train()
    clipped = [("begin", 0.0), ("before", 0.01), ("after", 0.01)]
    assert [name for name, _ in seen] == [name for name, _ in clipped] * 2
    assert [value for _, value in seen] == pytest.approx([v for _, v in clipped] * 2, rel=1e-3)


def test_callbacks_see_optimizer_steps_from_when_they_come_until_they_go(
    tmp_path: Path, library: Any
) -> None:
    seen: list[tuple[str, int]] = []

    class Listens(library.TrainerCallback):  # type: ignore[name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            seen.append(("before", state.global_step))

        def on_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            seen.append(("after", state.global_step))

    class Invites(library.TrainerCallback):  # type: ignore[name-defined]
        def on_step_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                training.add_callback(Listens)

        def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                training.remove_callback(Listens)

    training = trainer(library, tmp_path, max_steps=5, given={"callbacks": [Invites()]})
    training.train()
    assert seen == [(when, step) for step in (1, 2) for when in ("before", "after")]


class Ends:
    """Ends the run, or its epoch, at one step, and requests a log when the epoch ends."""

    def __init__(self, flag: str, step: int) -> None:
        self.flag, self.step = flag, step

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            setattr(control, self.flag, True)


@pytest.mark.row("L12", "L13", "L14")
@pytest.mark.parametrize(
    ("changes", "callback", "steps"),
    [
        ({"num_train_epochs": 2}, Ends("should_epoch_stop", 2), 9),
        ({"num_train_epochs": 2}, Ends("should_training_stop", 3), 3),
        ({"max_steps": 3}, Ends("", 0), 3),
    ],
    ids=["epoch", "run", "max_steps"],
)
def test_where_a_run_ends_its_epoch_ends_too(
    tmp_path: Path, changes: dict[str, Any], callback: Ends, steps: int
) -> None:
    wanted = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
    given = {"callbacks": [callback]}
    runs = both(tmp_path, lambda lib, at: trainer(lib, at, **wanted, **changes, given=given))
    assert_same_runs(*runs)
    assert runs[0].state.global_step == steps
    folders = [sorted(each.name for each in (tmp_path / at).iterdir()) for at in LIBRARIES]
    assert folders[0] == folders[1] != []


@pytest.mark.row("L12", "S9")
def test_an_epoch_that_is_left_takes_the_counts_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feed batches ahead, as to GPUs. The batch that was read ahead belongs to no update."""

    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        return (each for each, _ in itertools.pairwise(itertools.chain(batches, [None])))

    def make(library: Any, folder: Path) -> Any:
        given = {"callbacks": [Ends("should_epoch_stop", 2)]}
        asked = {"num_train_epochs": 2, "average_tokens_across_devices": False, "given": given}
        made = trainer(library, folder, llama(), **asked)
        if library is compat:
            monkeypatch.setattr(made.driver_session.session, "feed", ahead)
        return made

    assert_same_runs(*both(tmp_path, make))


@pytest.mark.row("L16")
def test_the_device_cache_is_emptied_every_n_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    made = trainer(compat, tmp_path, max_steps=5, torch_empty_cache_steps=2)
    step = lambda: emptied.append(made.state.global_step)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "empty_cache", step)
    made.train()
    assert emptied == [0, 2, 4]


@pytest.mark.row("L18", "L19")
def test_train_and_what_it_returns(tmp_path: Path, library: Any) -> None:
    calls: list[dict[str, Any]] = []

    class Inner(library.Trainer):
        def _inner_training_loop(
            self, batch_size: Any = None, args: Any = None, **rest: Any
        ) -> Any:
            calls.append({"batch_size": batch_size, **rest})
            return super()._inner_training_loop(batch_size, args, **rest)

    made = trainer(library, tmp_path, kind=Inner, max_steps=3)
    output = made.train(resume_from_checkpoint=False)
    assert type(output).__name__ == "TrainOutput"
    assert (output.global_step, output.training_loss) == (3, output.metrics["train_loss"])
    assert calls == [
        {
            "batch_size": 2,
            "resume_from_checkpoint": None,
            "trial": None,
            "ignore_keys_for_eval": None,
        }
    ]
    with pytest.raises(TypeError, match="unexpected keyword"):
        made.train(epochs=3)


@pytest.mark.row("L20", "L21")
def test_training_twice_starts_the_schedule_over(tmp_path: Path) -> None:
    def twice(library: Any, at: Path) -> Any:
        made = trainer(library, at, max_steps=3)
        made.train()
        assert made.model.training
        optimizer = made.optimizer
        made.evaluate()
        assert not made.model.training
        made.train()
        assert made.optimizer is optimizer
        return made

    ours, theirs = (twice(lib, tmp_path / name) for name, lib in LIBRARIES.items())
    assert_same_runs(ours, theirs)
    assert ours.state.log_history[0]["learning_rate"] == pytest.approx(0.05)


@pytest.mark.row("S2", "S3", "S8", "S15")
@pytest.mark.parametrize("scaled", [None, True, False])
def test_a_loss_of_a_subclass(tmp_path: Path, scaled: bool | None) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])

    def make(library: Any, at: Path) -> Any:
        class Weighted(library.Trainer):
            loss_is_scaled_for_ga = scaled

            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
            ) -> Any:
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                loss = nn.functional.cross_entropy(outputs["logits"], labels, weight)
                loss = loss + 0.01 * outputs["logits"].square().mean()
                return (loss, outputs) if return_outputs else loss

        changes = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
        return trainer(library, at, kind=Weighted, num_train_epochs=1, **changes)

    assert_same_runs(*both(tmp_path, make))


@pytest.mark.row("S4")
def test_a_loss_function_is_given_the_labels_and_their_count(tmp_path: Path) -> None:
    counts: list[int] = []

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        counts.append(int(num_items_in_batch))
        assert "loss" not in outputs
        total = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return total / num_items_in_batch

    given = {"compute_loss_func": loss_of}
    changes = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "given": given}
    assert_same_runs(*both(tmp_path, lambda lib, at: trainer(lib, at, **changes)))
    assert counts == [4, 4, 4, 4, 4, 4, 2] * 2


@pytest.mark.row("S13")
@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_finite(tmp_path: Path, filtered: bool) -> None:
    def make(library: Any, at: Path) -> Any:
        class Bad(library.Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                loss = super().training_step(*args, **kwargs)
                return loss * float("nan") if self.state.global_step in (1, 4) else loss

        changes = {"logging_nan_inf_filter": filtered, "logging_steps": 3, "max_steps": 6}
        return trainer(library, at, kind=Bad, **changes)

    ours, theirs = both(tmp_path, make)
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    assert np.isfinite(ours.state.log_history[0]["loss"]) == filtered


@pytest.mark.row("S14")
def test_the_context_of_the_loss_may_be_ones_own(tmp_path: Path, library: Any) -> None:
    inside: list[bool] = []

    class Own(library.Trainer):
        @contextlib.contextmanager
        def compute_loss_context_manager(self) -> Any:
            inside.append(True)
            yield
            inside.append(False)

    trainer(library, tmp_path, kind=Own, max_steps=2).train()
    assert inside == [True, False] * 2
    assert hasattr(trainer(library, tmp_path).autocast_smart_context_manager(), "__enter__")


@pytest.mark.row("P4")
def test_evaluation_in_half_precision_casts_the_model(tmp_path: Path) -> None:
    found = []
    for name, lib in LIBRARIES.items():
        made = trainer(lib, tmp_path / name, bf16_full_eval=True, max_steps=2)
        found.append((made.evaluate()["eval_loss"], made.model.outer.weight.dtype))
    assert found[0] == (pytest.approx(found[1][0], rel=1e-3), torch.bfloat16)


@pytest.mark.row("P8")
def test_a_model_in_bfloat16_trains_in_it(tmp_path: Path) -> None:
    changes, half = {"max_steps": 4, "optim": "sgd"}, lambda: classifier().bfloat16()
    ours, theirs = both(tmp_path, lambda lib, at: trainer(lib, at, half(), **changes))
    assert ours.model.outer.weight.dtype == torch.bfloat16
    losses = [[log.get("loss") for log in each.state.log_history[:4]] for each in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.row(
    "O4", status="differs", note="called where a subclass overrides it, which 5.23 never does"
)
def test_both_are_built_where_that_is_overridden(tmp_path: Path) -> None:
    calls: list[int] = []

    class Own(compat.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            calls.append(num_training_steps)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 0.5)

    made = trainer(compat, tmp_path, kind=Own, max_steps=3)
    made.train()
    assert calls == [3]
    assert made.state.log_history[0]["learning_rate"] == 0.25
    assert type(getattr(made.optimizer, "optimizer", made.optimizer)) is torch.optim.SGD


@pytest.mark.row("W1", "W2", "W8")
def test_a_model_is_wrapped_once_and_found_again(tmp_path: Path, library: Any) -> None:
    made = trainer(library, tmp_path, max_steps=2)
    made.evaluate()
    assert made.model_wrapped is made.model
    made.train()
    once = made._wrap_model(made.model)
    assert made._wrap_model(once) is once
    assert made.accelerator.unwrap_model(nn.parallel.DataParallel(made.model)) is made.model
    made._move_model_to_device(made.model, torch.device("meta"))
    assert made.model.outer.weight.device.type == "meta"


@pytest.mark.row("W1")
@pytest.mark.parametrize("places", [{}, {"": "cpu"}])
def test_a_model_that_was_split_over_devices_stays(
    tmp_path: Path, library: Any, places: dict[str, Any]
) -> None:
    made, model = trainer(library, tmp_path), classifier()
    model.hf_device_map = places
    made._move_model_to_device(model, torch.device("meta"))
    assert model.outer.weight.device.type == "cpu"


@pytest.mark.row("R3", "R4", "K11", "K12")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_draws_the_same_dropout(
    tmp_path: Path, library: Any, accumulation: int
) -> None:
    changes = {"max_steps": 6, "gradient_accumulation_steps": accumulation}
    whole = trainer(library, tmp_path / "whole", classifier(0.5), **changes)
    whole.train()
    saved = {"save_strategy": "steps", "save_steps": 3, **changes}
    trainer(library, tmp_path / "stopped", classifier(0.5), **saved).train()
    random.random(), np.random.rand(), torch.rand(1)
    resumed = trainer(library, tmp_path / "stopped", classifier(0.5), **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    losses = [[log["loss"] for log in each.state.log_history[:6]] for each in (resumed, whole)]
    assert losses[0] == losses[1]
    assert torch.equal(resumed.model.outer.weight, whole.model.outer.weight)


@pytest.mark.row(
    "R10", status="differs", note="equal weights with and without evaluation; there dropout changes"
)
def test_evaluation_draws_nothing_of_the_training(tmp_path: Path) -> None:
    weights = []
    for strategy in ("no", "steps"):
        changes = {"eval_strategy": strategy, "eval_steps": 1, "max_steps": 4}
        made = trainer(compat, tmp_path / strategy, classifier(0.5), **changes)
        made.train()
        weights.append(made.model.outer.weight)
    assert torch.equal(*weights)


def test_batches_may_be_lists_of_samples_that_a_trainer_joins(tmp_path: Path) -> None:
    """Train on batches like those of TRL's GRPO, whose tokens nothing counts."""

    def make(library: Any, folder: Path) -> Any:
        def prepare(self: Any, inputs: Any) -> Any:
            return self._joined(inputs) if isinstance(inputs, list) else inputs

        members = {"_prepare_inputs": prepare, "_joined": staticmethod(default_data_collator)}
        kind = type("Joins", (library.Trainer,), members)
        given = {"data_collator": list}
        return trainer(library, folder, kind=kind, given=given, include_num_input_tokens_seen="all")

    ours, theirs = both(tmp_path, make)
    assert_same_runs(ours, theirs)
    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen == 0
