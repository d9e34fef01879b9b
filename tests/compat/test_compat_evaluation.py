"""Evaluation and prediction, compared with transformers' Trainer."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import Classifier, accuracy, both, losses, samples, without_times
from torch import Tensor, nn

from drivetrain.compat import TrainerCallback
from drivetrain.compat.evaluation.outputs import EvalPrediction


def same(mine: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        return len(mine) == len(wanted) and all(map(same, mine, wanted))
    if isinstance(wanted, np.ndarray):
        return mine.dtype == wanted.dtype and np.array_equal(mine, wanted, equal_nan=True)
    return bool(mine == wanted)


@pytest.mark.row("E1", "E3", "E13", "E19", "E20", "M1", "M3", "M4", "B15")
def test_evaluate(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(compute_metrics=accuracy)
        first, again = trainer.evaluate(), trainer.evaluate(metric_key_prefix="val")
        assert all(isinstance(value, float | int) for value in first.values())
        keys = list(first), [name for name in again if "preparation" in name]
        found.append((without_times(first), without_times(again), sorted(keys[0]), keys[1]))
    assert found[0] == found[1]


@pytest.mark.row("E2", "E3", "K30")
def test_several_data_sets(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(eval_dataset={"a": samples(5), "b": samples(7)})
        metrics = [trainer.evaluate(), trainer.evaluate("b"), trainer.evaluate({"c": samples(3)})]
        history = [sorted(without_times(entry)) for entry in trainer.state.log_history]
        found.append((list(map(without_times, metrics)), history))
    assert found[0] == found[1]


@pytest.mark.row("E4", "D17")
def test_predict(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(compute_metrics=accuracy, dataloader_drop_last=True)
        with_labels, without = trainer.predict(samples(11)), trainer.predict(samples(9, False))
        assert without.label_ids is None and "test_loss" not in without.metrics
        assert trainer.state.log_history == []
        found.append((with_labels[:2], without.predictions, without_times(with_labels.metrics)))
    assert same(found[0], found[1])
    assert len(found[0][1]) == 8


class Ragged(nn.Module):
    """A model whose rows are as long as the longest of the batch, with several outputs
    and labels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(
        self, x: Tensor, start_labels: Tensor | None = None, end_labels: Tensor | None = None
    ) -> dict[str, Any]:
        width = int(x.max())
        logits = x[:, None] * torch.arange(width)[None] * self.weight
        loss = {} if start_labels is None else {"loss": (x * self.weight).mean()}
        return {**loss, "logits": logits, "hidden": {"pair": (x, x + 1)}, "cache": [x]}


@pytest.mark.row("E5", "E8", "E9", "E10", "E14", "E15", "E17", "M2", "M6", "M7")
@pytest.mark.parametrize("concatenated", [True, False])
def test_nested_outputs_of_different_widths(tmp_path: Path, concatenated: bool) -> None:
    data = [
        {"x": torch.tensor(float(n)), "start_labels": torch.tensor(n), "end_labels": torch.ones(2)}
        for n in (2, 3, 1, 2, 5, 4)
    ]
    found: list[Any] = []
    for side in both(tmp_path):
        seen: list[Any] = []

        def measure(prediction: Any, seen: list[Any] = seen) -> dict[str, Any]:
            seen.extend(prediction)
            return {}

        def halve(logits: Any, labels: Any) -> Any:
            assert len(labels) == 2
            return (logits[0] / 2, *logits[1:])

        trainer = side.trainer(
            Ragged,
            compute_metrics=measure,
            preprocess_logits_for_metrics=halve,
            eval_dataset=data,
            per_device_eval_batch_size=2,
            eval_do_concat_batches=concatenated,
            include_for_metrics=["inputs", "loss"],
            label_names=["start_labels", "end_labels"],
        )
        trainer.model.main_input_name = "x"
        metrics = trainer.evaluate(ignore_keys=["cache"])
        found.append((seen, metrics["eval_loss"]))
    assert len(found[0][0]) == 4
    predictions = found[0][0][0]
    assert (isinstance(predictions, list), len(predictions)) == (
        (False, 2) if concatenated else (True, 3)
    )
    assert same([list_of(part) for part in found[0][0]], [list_of(part) for part in found[1][0]])
    assert found[0][1] == found[1][1]


def list_of(value: Any) -> Any:
    """Return nested containers as lists, so that a tuple equals a list of the same values."""
    if isinstance(value, dict):
        return [list_of(part) for part in value.values()]
    return [list_of(part) for part in value] if isinstance(value, list | tuple) else value


@pytest.mark.row("E11", "E12", "E16")
@pytest.mark.parametrize("asked", [{"prediction_loss_only": True}, {"eval_accumulation_steps": 1}])
def test_what_is_kept(tmp_path: Path, asked: dict[str, Any]) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(compute_metrics=accuracy, **asked)
        output = trainer.predict(samples(11))
        found.append((output[:2], without_times(output.metrics)))
    assert same(found[0], found[1])
    assert (found[0][0][0] is None) == ("prediction_loss_only" in asked)


class Recorder(TrainerCallback):
    """A metric that records the sizes of its batches, and whether each was the last."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []
        self.right = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, Any]:
        assert isinstance(prediction.predictions, Tensor)
        self.seen.append((len(prediction.label_ids), compute_result))
        self.right += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        return {"right": self.right} if compute_result else {}


@pytest.mark.row("M5", "C24")
def test_metrics_by_batch(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        metric = Recorder()
        trainer = side.trainer(compute_metrics=metric, batch_eval_metrics=True)
        metrics = trainer.evaluate()
        found.append((metric.seen, without_times(metrics)))
    assert found[0] == found[1]
    assert found[0][0] == [(4, False), (4, False), (3, True)]


@pytest.mark.row("E25", "L21", "R10")
def test_evaluating_changes_nothing_of_training(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    data = samples(8)

    class Augmented(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            return {**data[index], "x": data[index]["x"] + torch.rand(4)}

    curves = []
    for strategy in ("no", "steps"):
        trainer = ours.trainer(
            partial(Classifier, dropout=0.5),
            train_dataset=data,
            eval_dataset=Augmented(),
            eval_strategy=strategy,
            eval_steps=1,
            max_steps=4,
        )
        trainer.train()
        curves.append(losses(trainer))
        before = torch.get_rng_state()
        trainer.evaluate(Augmented())
        assert torch.equal(torch.get_rng_state(), before)
        assert not trainer.model.training
    assert curves[0] == curves[1]


@pytest.mark.row("S13")
def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    broken = [
        {**sample, "x": sample["x"] * (math.nan if n < 4 else 1)}
        for n, sample in enumerate(samples(11))
    ]
    for filtered in (True, False):
        found = []
        for side in both(tmp_path):
            trainer = side.trainer(eval_dataset=broken, logging_nan_inf_filter=filtered)
            found.append(trainer.evaluate()["eval_loss"])
        assert same(np.array(found[0]), np.array(found[1]))
        assert math.isfinite(found[0]) == filtered


def test_a_loss_of_compute_metrics_stands_before_the_model_s(tmp_path: Path) -> None:
    """Require that the loss of `compute_metrics` decides which checkpoint is the best."""
    found = []
    for side in both(tmp_path):
        scores = iter((2.0, 1.0, 3.0, 1.5))
        trainer = side.trainer(
            compute_metrics=lambda _, scores=scores: {"loss": next(scores), "mine": 7.0},
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=1,
            save_steps=1,
            max_steps=3,
            load_best_model_at_end=True,
        )
        trainer.train()
        metrics = without_times(trainer.evaluate())
        found.append((trainer.state.best_global_step, trainer.state.best_metric, metrics))
    assert found[0] == found[1]
    assert found[0][:2] == (2, 1.0) and found[0][2]["eval_loss"] == 1.5


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples(6))


@pytest.mark.row("E19", "E6")
def test_a_stream_is_counted(tmp_path: Path) -> None:
    counts = []
    for side in both(tmp_path):
        trainer = side.trainer()
        loader = trainer.get_eval_dataloader(Stream())
        output = trainer.evaluation_loop(loader, "Evaluation", metric_key_prefix="x")
        counts.append((output.num_samples, len(output.predictions), output.metrics["x_loss"]))
    assert counts[0] == counts[1] and counts[0][0] == 6


@pytest.mark.row("E7")
def test_the_old_loop_is_another_name(tmp_path: Path) -> None:
    trainer = both(tmp_path)[0].trainer()
    loader = trainer.get_eval_dataloader()
    new, old = (loop(loader, "x") for loop in (trainer.evaluation_loop, trainer.prediction_loop))
    assert same(old.predictions, new.predictions) and old.metrics == new.metrics


@pytest.mark.row("E23")
def test_old_names_of_gathering(tmp_path: Path) -> None:
    trainer = both(tmp_path)[0].trainer()
    tensors = (torch.arange(3), {"a": torch.ones(2, 2)})
    assert same(
        list_of(trainer._gather_and_numpify(tensors, "t")),
        [np.arange(3), [np.ones((2, 2), np.float32)]],
    )
    assert trainer._nested_gather(None) is None
    assert trainer._pad_across_processes(tensors[0]) is tensors[0]


class Matching(nn.Module):
    """A model that computes a loss from its inputs alone, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, return_loss: bool = True) -> dict[str, Any]:
        y = self.layer(x)
        return {"loss": (y - x).square().mean(), "y": y} if return_loss else {"y": y}


@pytest.mark.row("E26", "C26")
def test_a_loss_without_labels(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(Matching, train_dataset=None)
        output = trainer.predict(samples(6, labels=False))
        found.append((output.predictions, output.metrics["test_loss"]))
    assert same(found[0], found[1])


@pytest.mark.row("P4", "E24")
def test_evaluating_in_half_precision(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(
            bf16_full_eval=True,
            bf16=False,
            use_cpu=True,
            compute_metrics=accuracy,
            data_collator=half_floats,
        )
        metrics = trainer.evaluate()
        assert trainer.model.outer.weight.dtype == torch.bfloat16
        found.append(without_times(metrics))
    assert found[0] == found[1]


def half_floats(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([sample["x"] for sample in batch]).bfloat16(),
        "labels": torch.stack([sample["labels"] for sample in batch]),
    }


@pytest.mark.row("K29", "K30")
@pytest.mark.parametrize("greater", [True, False])
def test_the_best_metric(tmp_path: Path, greater: bool) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(
            metric_for_best_model="b_loss", greater_is_better=greater, save_strategy="steps"
        )
        noted = []
        for step, value in enumerate([3.0, 3.0, 2.0, 4.0, math.nan], 1):
            trainer.state.global_step = step
            improved = trainer._determine_best_metric({"eval_b_loss": value}, trial=None)
            noted.append(
                (bool(improved), trainer.state.best_metric, trainer.state.best_global_step)
            )
        found.append(noted)
        with pytest.raises(KeyError, match="eval_other"):
            trainer._determine_best_metric({"eval_other": 1.0}, trial=None)
    assert found[0] == found[1]


@pytest.mark.row("O23")
def test_a_schedule_that_follows_a_metric(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        trainer = side.trainer(
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
            metric_for_best_model="score",
            greater_is_better=True,
            eval_strategy="steps",
            eval_steps=1,
            eval_on_start=True,
            max_steps=4,
            compute_metrics=lambda prediction: {"score": 1.0},
        )
        trainer.train()
        history = trainer.state.log_history
        found.append([entry["learning_rate"] for entry in history if "learning_rate" in entry])
    assert found[0] == found[1] and len(set(found[0])) > 1


class Order(TrainerCallback):
    """Records the order of logs, evaluations and saves."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        kinds = [kind for kind in ("loss", "eval_loss", "train_loss") if kind in logs]
        self.seen.append(f"log {kinds[0]} {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"evaluate {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        stored = (folder / "trainer_state.json").read_text()
        self.seen.append(f"save {state.global_step} {'eval_loss' in stored}")


@pytest.mark.row("E22")
def test_logging_then_evaluating_then_saving(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        asked = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
        trainer = side.trainer(**asked, save_steps=2, max_steps=4, callbacks=[order := Order()])
        trainer.train()
        found.append(order.seen)
    assert found[0] == found[1]
    second = ["log loss 2", "log eval_loss 2", "evaluate 2", "save 2 True"]
    assert found[0][1:5] == second


@pytest.mark.row("L17")
def test_out_of_memory_in_evaluation_is_said_to_be_that(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)

    def too_much(prediction: Any) -> dict[str, float]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 TiB")

    trainer = ours.trainer(
        auto_find_batch_size=True, eval_strategy="steps", eval_steps=1, compute_metrics=too_much
    )
    with pytest.raises(RuntimeError, match="per_device_eval_batch_size"):
        trainer.train()
