"""Reports of a Trainer on request: statistics by parameter, memory, and the first tensor that is
not finite.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Classifier, arguments, classifier, samples
from subjects import subject
from torch import Tensor, nn

from drivetrain import compat
from drivetrain.compat.errors import ArgumentError, ArgumentRefused

NAMES = ["inner.bias", "inner.weight", "outer.bias", "outer.weight"]


class Logs(compat.TrainerCallback):
    """Keeps each log that callbacks receive."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append({**kwargs["logs"], "step": state.global_step})


class Messages(logging.Handler):
    """Keeps the text of each message."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def statistics_of(log: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in log.items() if name.startswith("stats/")}


def trainer(
    folder: Any,
    kind: Any = compat.Trainer,
    *,
    model: nn.Module | None = None,
    callbacks: Any = (),
    bad_row: int | None = None,
    bad: float = math.nan,
    **given: Any,
) -> Any:
    """Return a Trainer with batches of two in the order of the data. `bad_row`: a sample of which
    a feature is `bad`."""
    data = samples(16)
    if bad_row is not None:
        data[bad_row]["x"][1] = bad
    given = {"train_sampling_strategy": "sequential", "max_steps": 4, **given}
    return kind(
        model or classifier(),
        arguments(compat, folder, **given),
        train_dataset=data,
        callbacks=[*callbacks],
    )


# --- statistics by parameter -----------------------------------------------------------------


def test_statistics_are_logs_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = Logs()
    given = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3, "stats_steps": 2}
    before = {name: each.detach().clone() for name, each in classifier().named_parameters()}
    made = trainer(tmp_path, callbacks=[logs], **given)
    made.train()
    found = {log["step"]: statistics_of(log) for log in logs.seen if statistics_of(log)}
    assert [*found] == [2, 4]
    kinds = ["grad_norm", "weight_norm", "update_norm", "update_ratio"]
    kinds += [f"{of}_{what}" for of in ("grad", "weight") for what in ("zeros", "nonfinite")]
    assert sorted(found[2]) == sorted(f"stats/{kind}/{name}" for kind in kinds for name in NAMES)
    norm = float(before["inner.weight"].norm())
    assert found[2]["stats/weight_norm/inner.weight"] == pytest.approx(norm, rel=0.5)
    assert found[2]["stats/update_norm/inner.weight"] > 0
    assert found[2]["stats/grad_nonfinite/inner.weight"] == 0
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "stats/" not in json.dumps(kept)
    assert "stats/" not in capsys.readouterr().out
    plain = trainer(tmp_path / "plain", **{**given, "stats_steps": None})
    plain.train()
    for mine, other in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_norms_of_all_parameters_are_the_norm_of_the_log(tmp_path: Path) -> None:
    logs = Logs()
    trainer(tmp_path, callbacks=[logs], stats_steps=1, gradient_accumulation_steps=2).train()
    norms = {log["step"]: log["grad_norm"] for log in logs.seen if "grad_norm" in log}
    for log in logs.seen:
        if found := statistics_of(log):
            squares = sum(found[f"stats/grad_norm/{name}"] ** 2 for name in NAMES)
            assert math.sqrt(squares) == pytest.approx(norms[log["step"]], rel=1e-5)
            assert "epoch" in log


def test_a_step_that_is_not_finite_is_counted(tmp_path: Path) -> None:
    logs = Logs()
    trainer(tmp_path, callbacks=[logs], stats_steps=1, bad_row=3).train()
    found = {log["step"]: statistics_of(log) for log in logs.seen if statistics_of(log)}
    assert found[2]["stats/grad_nonfinite/inner.weight"] > 0
    assert found[2]["stats/update_norm/inner.weight"] == 0


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_an_invalid_number_of_steps_is_refused(tmp_path: Path, steps: Any) -> None:
    with pytest.raises(ArgumentError, match=r"stats_steps is .*; it must be an integer above 0"):
        arguments(compat, tmp_path, stats_steps=steps)


def test_a_driver_that_shows_no_updates_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path, stats_steps=2)
    made._wrap_model(made.model)
    monkeypatch.delattr("drivetrain.backends.common.shown.ShowsWholeWeights.show_update")
    with pytest.raises(
        ArgumentRefused, match=r"driver 'cpu' refuses stats_steps=2: .* set stats_steps=None"
    ):
        made.train()
    assert made.state.global_step == 0


# --- memory ------------------------------------------------------------------------------------


def test_parts_of_memory_are_named_after_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, memory_parts=True).train()
    (found,) = (text for text in caplog.messages if text.startswith("memory: "))
    assert "after step 1" in found
    num_bytes = 4 * sum(each.numel() for each in classifier().parameters())
    assert f"weights that are trained {num_bytes} B, " in found
    assert f"gradients {num_bytes} B" in found
    assert "optimizer state " in found and "activations " in found
    for name in ("per_device_train_batch_size=1", "gradient_checkpointing=True", "bf16=True"):
        assert name in found
    assert "`optim`" in found
    for name in ("micro_batch=", "activation_checkpointing", "optimizer.name", "precision="):
        assert name not in found


class Cramped(Classifier):
    """A model without memory for training, after `room` steps."""

    room = 2

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.room == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.room -= 1
        return super().forward(x, labels)


@pytest.mark.parametrize("room", [0, 2])
def test_an_error_of_memory_names_the_largest_parts(tmp_path: Path, room: int) -> None:
    model = Cramped()
    model.room = room
    made = trainer(tmp_path, model=model, memory_parts=True)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        made.train()
    text = str(raised.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 2 GiB")
    assert "The largest parts of memory, and what shrinks them: optimizer state " in text
    assert ("(estimated)" in text) == (room == 0)
    assert "`optim`" in text and "weights that are trained" in text


def test_a_smaller_batch_is_announced_with_the_largest_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Shrinks(Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if len(x) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x, labels)

    with caplog.at_level(logging.WARNING):
        made = trainer(tmp_path, model=Shrinks(), memory_parts=True, auto_find_batch_size=True)
        made.train()
    assert made.state.global_step == 4
    (found,) = (text for text in caplog.messages if "continuing with 1" in text)
    assert "The largest parts of memory" in found


# --- the first tensor that is not finite -------------------------------------------------------


def searched(caplog: pytest.LogCaptureFixture, *args: Any, **given: Any) -> list[str]:
    """Train, and return the messages of the search."""
    with caplog.at_level(logging.WARNING):
        made = trainer(*args, find_nonfinite=True, **given)
        made.train()
    made.end()
    return [text for text in caplog.messages if "is not finite: " in text]


def test_the_module_and_the_sample_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = searched(caplog, tmp_path, bad_row=7, gradient_accumulation_steps=2)
    assert found.startswith("step 2 is not finite: ")
    assert "batch['x'] is the first NaN, in microbatch 1, sample 1" in found


class Overflows(Classifier):
    """A model whose scores are not finite in its fourth forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(torch.log(x - x + (self.calls != 4)) + x, labels)


def test_a_search_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compare with a Trainer that does not search, with dropout in the model."""
    ends = []
    for finds in (True, False):
        given = {"bad_row": 5, "stats_steps": None, "max_steps": 6, "find_nonfinite": finds}
        made = trainer(tmp_path / str(finds), model=classifier(0.5), **given)
        made.train()
        losses = [log.get("loss") for log in made.state.log_history]
        ends.append((losses, [each.tolist() for each in made.model.parameters()]))
    assert ends[0] == ends[1]


class OwnLoss(compat.Trainer):
    """A Trainer whose loss is computed by its own method, which keeps notes."""

    notes: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noted: dict[str, list[float]] = {"loss": []}

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs)["logits"]
        loss = nn.functional.cross_entropy(logits, labels)
        if (inputs["x"] > 50).any():
            loss = torch.log(loss - loss - 1)
        self.notes += 1
        self.noted["loss"].append(loss.item())
        self.log({"own": loss.item()})
        return loss


def test_operations_of_compute_loss_are_named_and_its_notes_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = samples(16)
    data[4]["x"][0] = 100.0
    with caplog.at_level(logging.WARNING):
        made = OwnLoss(
            classifier(),
            arguments(
                compat,
                tmp_path,
                find_nonfinite=True,
                train_sampling_strategy="sequential",
                max_steps=5,
            ),
            train_dataset=data,
        )
        noted = made.noted
        made.train()
    (found,) = (text for text in caplog.messages if "is not finite: " in text)
    assert found.startswith("step 3 is not finite: ") and "log" in found
    assert "test_compat_diagnostics.py:" in found and "microbatch 0" in found
    assert "recipe" not in found
    assert made.notes == len(made.noted["loss"]) == 5 and made.noted is noted
    assert len([log for log in made.state.log_history if "own" in log]) == 5
    assert "log" not in vars(made)


class OwnStep(compat.Trainer):
    """A Trainer whose step is its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


def test_steps_of_a_subclass_are_not_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = searched(caplog, tmp_path, OwnStep, bad_row=3)
    assert found.startswith("step 2 is not finite: ")
    assert "OwnStep.training_step" in found and "override compute_loss" in found


def test_an_infinite_loss_is_found_whatever_the_log_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Train in fp16, where gradients overflow by design and the log replaces the loss."""
    given = {"logging_nan_inf_filter": True, "fp16": True, "backend": "ddp"}
    (found,) = searched(caplog, tmp_path, bad_row=3, **given)
    assert "batch['x'] is the first NaN" in found


def test_a_gradient_is_named_where_the_forward_is_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Give the model an infinite feature, which its `tanh` makes finite."""
    (found,) = searched(caplog, tmp_path, bad_row=3, bad=math.inf)
    assert found.startswith("step 2 is not finite: the gradient that the backward of ")
    assert "in `inner`" in found and "the gradient of `inner.weight` not finite" in found
    assert "microbatch 0" in found and "sample" not in found  # a weight's has no samples


def test_nothing_is_reported_unless_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = Logs()
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, callbacks=[logs], bad_row=3).train()
    assert not any(statistics_of(log) for log in logs.seen)
    assert not [text for text in caplog.messages if text.startswith("memory: ")]
    assert not [text for text in caplog.messages if "is not finite: " in text]


# --- two ranks ---------------------------------------------------------------------------------


def test_two_ranks_report_what_one_process_does(tmp_path: Path) -> None:
    import diagnostics_ranks

    both = subject("ddp", 2).run(diagnostics_ranks.diagnosed, folder=str(tmp_path / "both"))
    logs = Logs()
    given: dict[str, Any] = {"bad_row": 7, "stats_steps": 1, "max_steps": 3}
    given |= {"per_device_train_batch_size": 4}
    trainer(tmp_path / "alone", callbacks=[logs], **given).train()
    alone = [statistics_of(log) for log in logs.seen]
    first, second = both
    assert len(alone) == len(first["statistics"])
    for mine, other, whole in zip(first["statistics"], second["statistics"], alone, strict=True):
        assert mine == pytest.approx(other, nan_ok=True)
        assert mine == pytest.approx(whole, rel=1e-4, nan_ok=True)
    (found,) = (text for text in first["messages"] if "is not finite: " in text)
    bad = "batch['x'] is the first NaN, on rank 1, in microbatch 0, sample 1"
    assert found == f"step 2 is not finite: {bad}"
    assert not [text for text in second["messages"] if "is not finite: " in text]
    (memory,) = (text for text in first["messages"] if text.startswith("memory: "))
    assert "on rank " in memory and "weights that are trained" in memory
