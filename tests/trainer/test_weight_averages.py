"""Averages of weights: the updates that change them, their state in a resume, and their uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import evaluate, predict
from drivetrain.backends.common.single_process import HostSession
from drivetrain.checkpoint import CheckpointReader, average_weights, export_weights
from drivetrain.conformance.problems import PROBLEMS, Samples, collate
from drivetrain.kernel.errors import (
    CapabilityRefused,
    CheckpointMismatch,
    OutputError,
    SettingError,
)
from drivetrain.kernel.events import Resumed
from drivetrain.kernel.recipe import Recipe
from drivetrain.trainer.fit import Result, fit
from drivetrain.trainer.setting_values import override
from drivetrain.trainer.settings import Settings

DECAY = 0.75


def recipe(poison: int | None = None, dtype: torch.dtype = torch.float32) -> Recipe:
    problem = PROBLEMS["regression"]

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return problem.loss(module, {**batch, "x": batch["x"].to(dtype)})

    return problem.recipe(
        model=lambda: problem.model().to(dtype),
        loss=loss,
        measure=None,
        summarise=None,
        train_data=Samples("regression", 16, poison),
        eval_data={"some": Samples("regression", 8)},
    )


def settings(**given: Any) -> Settings:
    keys = {key.replace("__", "."): value for key, value in given.items()}
    return override(
        Settings(),
        {
            "steps": 6,
            "global_batch": 4,
            "data.shuffle": False,
            "optimizer.lr": 0.05,
            "checkpoint.every": 1,
            "checkpoint.keep_last": 20,
            "average.decay": DECAY,
            **keys,
        },
    )


def train(
    out: Path, of: Recipe | None = None, resume: Any = None, **given: Any
) -> tuple[Result, list[str]]:
    """Train; return the result, and the notes of the resume."""
    notes: list[str] = []

    def observe(event: object) -> None:
        if isinstance(event, Resumed):
            notes.extend(event.notes)

    result = fit(
        of or recipe(),
        settings(**given),
        backend="cpu",
        out=out,
        resume=resume,
        observers=[observe],
    )
    return result, notes


def weights(out: Path, step: int) -> dict[str, Tensor]:
    reader = CheckpointReader(out / f"checkpoints/checkpoint-{step:06}")
    return {name: reader.read("weights", name) for name in reader.names("weights")}


def averages(out: Path, step: int) -> dict[str, Tensor]:
    reader = CheckpointReader(out / f"checkpoints/checkpoint-{step:06}")
    return {
        name.removesuffix("/average"): reader.read("optimizer", name)
        for name in reader.names("optimizer")
        if name.endswith("/average")
    }


def by_hand(out: Path, steps: list[int]) -> dict[str, Tensor]:
    """Average the weights that were stored at these steps, without drivetrain."""
    model = PROBLEMS["regression"].model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in steps:
        model.load_state_dict(weights(out, step))
        averaged.update_parameters(model)
    return dict(averaged.module.named_parameters())


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() != set()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_an_update_that_is_not_applied_moves_no_average(tmp_path: Path) -> None:
    train(tmp_path, recipe(poison=5))  # in the second of four updates an epoch
    same(averages(tmp_path, 2), averages(tmp_path, 1))
    same(averages(tmp_path, 5), by_hand(tmp_path, [1, 3, 4, 5]))


def test_averages_of_weights_in_16_bits_are_kept_in_32(tmp_path: Path) -> None:
    low = recipe(dtype=torch.bfloat16)
    train(tmp_path / "a", low, evaluate__weights="average", evaluate__every=2)
    found = averages(tmp_path / "a", 6)
    same(found, by_hand(tmp_path / "a", [1, 2, 3, 4, 5, 6]))
    assert all(t.dtype == torch.float32 and (t != t.bfloat16()).any() for t in found.values())
    assert {t.dtype for t in weights(tmp_path / "a", 6).values()} == {torch.bfloat16}
    source = tmp_path / "a/checkpoints/checkpoint-000003"
    train(tmp_path / "b", low, resume=source)
    same(averages(tmp_path / "b", 6), found)


def test_averages_begin_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    train(tmp_path, average__decay=None)
    assert not averages(tmp_path, 6)
    _, notes = train(tmp_path, resume="auto", steps=9)
    assert "the checkpoint holds no averages of weights: they start from the weights" in notes
    same(averages(tmp_path, 9), by_hand(tmp_path, [7, 8, 9]))
    _, notes = train(tmp_path, resume="auto", steps=11)
    assert not [note for note in notes if "averages" in note]
    same(averages(tmp_path, 11), by_hand(tmp_path, [7, 8, 9, 10, 11]))
    _, notes = train(tmp_path, resume="auto", steps=12, average__decay=None)
    note = "the checkpoint's averages of weights are left out (average.decay is none)"
    assert note in notes
    assert not averages(tmp_path, 12)


def test_before_averages_begin_there_is_nothing_to_report(tmp_path: Path) -> None:
    given: dict[str, Any] = {"average__start": 5, "evaluate__weights": "average"}
    result, _ = train(tmp_path / "a", steps=4, **given)
    _, notes = train(tmp_path / "a", resume="auto", steps=6, **given)
    assert not [note for note in notes if "averages" in note]
    same(averages(tmp_path / "a", 6), by_hand(tmp_path / "a", [5, 6]))
    present, _ = train(tmp_path / "b", steps=4)
    assert result.metrics == present.metrics
    assert evaluate(recipe(), result.checkpoint, settings=settings(**given)) == present.metrics


def test_they_are_evaluated_predicted_with_and_exported(tmp_path: Path) -> None:
    given: dict[str, Any] = {"evaluate__weights": "average"}
    result, _ = train(tmp_path / "run", **given)
    present, _ = train(tmp_path / "present")
    assert result.checkpoint is not None
    model = PROBLEMS["regression"].model()
    model.load_state_dict(averages(tmp_path / "run", 6))
    data = Samples("regression", 8)
    batch = collate([data[index] for index in range(8)])
    with torch.no_grad():
        loss = PROBLEMS["regression"].loss(model, batch)
        outputs = model(batch["x"])
    expected = {"some": {"loss": pytest.approx(float(loss) / 8, rel=1e-6)}}
    assert result.metrics == expected != present.metrics
    assert evaluate(recipe(), result.checkpoint, settings=settings(**given)) == expected
    folder = export_weights(result.checkpoint, tmp_path / "exported", weights="average")
    same(load_file(folder / "model.safetensors"), averages(tmp_path / "run", 6))
    predicted = predict(
        recipe(),
        data,
        result.checkpoint,
        settings=settings(**given),
        forward=lambda module, batch: module(batch["x"]),
    )
    torch.testing.assert_close(predicted, outputs)


def test_what_has_no_average_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"set average\.decay"):
        fit(recipe(), settings(average__decay=None, evaluate__weights="average"), backend="cpu")
    result, _ = train(tmp_path, average__decay=None)
    assert result.checkpoint is not None
    with pytest.raises(CheckpointMismatch, match=r"average\.decay.*checkpoint average"):
        export_weights(result.checkpoint, tmp_path / "exported", weights="average")
    with pytest.raises(CheckpointMismatch, match="holds no averages"):
        evaluate(recipe(), result.checkpoint, settings=settings(evaluate__weights="average"))
    for key, value in {"decay": 1.5, "every": 0, "start": -1}.items():
        with pytest.raises(SettingError, match=rf"average\.{key}"):
            settings(**{f"average__{key}": value})


def test_a_driver_without_averages_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def __getattr__(self, name: str) -> Any:
            if name in ("average", "averaged"):
                raise AttributeError(name)
            return getattr(self.engine, name)

    prepare = HostSession.prepare
    monkeypatch.setattr(HostSession, "prepare", lambda self, recipe: Bare(prepare(self, recipe)))
    with pytest.raises(CapabilityRefused, match=r"'cpu' refuses average.decay=0.75"):
        fit(recipe(), settings(), backend="cpu")


def test_the_mean_of_checkpoints(tmp_path: Path) -> None:
    train(tmp_path / "run")
    chosen = [tmp_path / f"run/checkpoints/checkpoint-{step:06}" for step in (2, 4, 6)]
    target = average_weights(chosen, tmp_path / "mean/checkpoints")
    assert CheckpointReader(target).verify() == []
    stored = [weights(tmp_path / "run", step) for step in (2, 4, 6)]
    expected = {
        name: torch.stack([each[name].double() for each in stored]).mean(0).float()
        for name in stored[0]
    }
    same(weights(tmp_path / "mean", 0), expected)
    train(tmp_path / "on", resume=tmp_path / "mean/checkpoints", steps=1)
    with pytest.raises(OutputError, match="exists"):
        average_weights(chosen, tmp_path / "mean/checkpoints")


def test_the_mean_of_other_models_is_refused(tmp_path: Path) -> None:
    first, _ = train(tmp_path / "a", steps=1)
    second, _ = train(tmp_path / "b", recipe(dtype=torch.bfloat16), steps=1)
    assert first.checkpoint is not None and second.checkpoint is not None
    with pytest.raises(CheckpointMismatch, match=r"'0\.bias' is torch\.float32 .*bfloat16"):
        average_weights([first.checkpoint, second.checkpoint], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    with pytest.raises(SettingError, match="no checkpoint"):
        average_weights([], tmp_path / "mean")
