"""A failure after the last step: the weights are saved first, and nothing is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import (
    CheckpointSettings,
    EvaluateSettings,
    Recipe,
    Settings,
    checkpoint,
)
from drivetrain.checkpoint import read_manifest
from drivetrain.kernel.errors import FailedAfterTraining
from drivetrain.kernel.events import Evaluated, Event, Request, RunEnded, Saved, Warned
from drivetrain.trainer.fit import fit
from drivetrain.trainer.result import Result

from .problems import Pairs, build, squared_error

STEPS = 6
DUE = Settings(
    steps=STEPS,
    global_batch=8,
    evaluate=EvaluateSettings(at_end=False, every=3),
    checkpoint=CheckpointSettings(at_end=True),
)
AT_END = Settings(steps=STEPS, global_batch=8, log_every=4)


def measured(sums: Mapping[str, Tensor]) -> dict[str, float]:
    return {"loss": float(sums["loss"] / sums["samples"])}


def model() -> nn.Module:
    torch.manual_seed(3)
    return build()


class Broken:
    """A `summarise` that fails in the evaluation of this number, counted from 1, that covers all
    samples; the sanity check has fewer."""

    def __init__(self, number: int = 1, error: BaseException | None = None) -> None:
        self.number, self.seen = number, 0
        self.error = error or KeyError("accuracy")

    def __call__(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        self.seen += float(sums["samples"]) == 50
        if self.seen == self.number and float(sums["samples"]) == 50:
            raise self.error
        return measured(sums)


def train(
    out: Path | None, settings: Settings, summarise: Callable[..., Any] = measured, **given: Any
) -> Result:
    recipe = Recipe(model, squared_error, Pairs(), eval_data={"held": Pairs()}, summarise=summarise)
    return fit(recipe, settings, backend="cpu", out=out, **given)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("error", [KeyError("accuracy"), SystemExit(7)], ids=["error", "exit"])
@pytest.mark.parametrize(("settings", "number"), [(AT_END, 1), (DUE, 2)], ids=["at end", "due"])
def test_a_metric_that_fails_at_the_end(
    tmp_path: Path, settings: Settings, number: int, error: BaseException
) -> None:
    undisturbed = train(None, settings, finish=weights).finish
    with pytest.raises(
        FailedAfterTraining,
        match=r"finished at step 6, saved in .*-000006; then the last evaluation failed: .*"
        r" --resume auto",
    ) as caught:
        train(tmp_path, settings, Broken(number, error))
    assert caught.value.exit_code == 3
    assert caught.value.__cause__ is error
    assert caught.value.checkpoint == str(tmp_path / "checkpoints" / "checkpoint-000006")
    evaluated: list[Event] = []

    def note(event: Event) -> None:
        if isinstance(event, Evaluated):
            evaluated.append(event)

    again = train(tmp_path, settings, resume="auto", finish=weights, observers=[note])
    assert len(evaluated) == 1  # the evaluation that failed is made
    assert again.metrics["held"]["loss"] > 0
    assert undisturbed.keys() == again.finish.keys()
    for name, value in undisturbed.items():
        assert torch.equal(value, again.finish[name])
    assert read_manifest(tmp_path / "checkpoints" / "checkpoint-000006").state["metrics"]


def test_what_was_trained_is_there_before_the_last_evaluation(tmp_path: Path) -> None:
    found: list[bool] = []

    def look(sums: Mapping[str, Tensor]) -> dict[str, float]:
        found.append((tmp_path / "checkpoints" / "checkpoint-000006").is_dir())
        return measured(sums)

    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)

    settings = Settings(
        steps=STEPS, global_batch=8, evaluate=EvaluateSettings(every=2, sanity_check=False)
    )
    result = train(tmp_path, settings, look, observers=[note])
    assert found == [False, False, True]
    kinds = [type(event) for event in events if isinstance(event, (Saved, Evaluated))]
    assert kinds == [Evaluated, Evaluated, Saved, Evaluated]
    assert result.checkpoint is not None
    state = read_manifest(result.checkpoint).state
    assert state["metrics"]["held.loss"] == result.metrics["held"]["loss"]
    assert result.best == result.checkpoint
    assert checkpoint.CheckpointReader(result.checkpoint).damaged_files() == []


def test_metrics_that_cannot_be_added_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drivetrain.checkpoint.store.replace_manifest", full)
    warned: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Warned):
            warned.append(event.message)

    result = train(tmp_path, AT_END, observers=[note])
    assert result.metrics["held"]
    assert any("could not be added to its checkpoint" in each for each in warned)
    assert train(tmp_path, AT_END, resume="auto").step == STEPS


@pytest.mark.parametrize("last_is_best", [True, False])
def test_which_checkpoints_stay_is_decided_by_the_last_metrics_too(
    tmp_path: Path, last_is_best: bool
) -> None:
    values = iter([3.0, 1.0, 2.0, 0.5 if last_is_best else 9.0])

    def fixed(sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": next(values)} if float(sums["samples"]) == 50 else measured(sums)

    settings = Settings(
        steps=8,
        global_batch=8,
        evaluate=EvaluateSettings(every=2, sanity_check=False),
        checkpoint=CheckpointSettings(every=2, keep_last=1, keep_best=1),
    )
    train(tmp_path, settings, fixed)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    best = [] if last_is_best else ["checkpoint-000004"]
    assert kept == [*best, "checkpoint-000008"]


class Raising:
    """An observer that raises from the last step on, at events of this name."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name, self.error = name, error

    def __call__(self, event: Event) -> None:
        if type(event).__name__ == self.name and getattr(event, "step", STEPS) >= STEPS:
            raise self.error


@pytest.mark.parametrize("name", ["StepEnded", "Logged", "Saved", "Evaluated", "RunEnded"])
def test_an_observer_that_raises_at_the_end(tmp_path: Path, name: str) -> None:
    ended: list[Event] = []

    def note(event: Event) -> None:
        if isinstance(event, (RunEnded, Evaluated)):
            ended.append(event)

    error = ConnectionError("the server is away")
    with pytest.raises(
        FailedAfterTraining, match=rf"observer Raising \(at {name}\) failed: ConnectionError"
    ) as caught:
        train(tmp_path, AT_END, observers=[Raising(name, error), note])
    assert caught.value.__cause__ is error
    assert Path(caught.value.checkpoint).name == "checkpoint-000006"
    assert [type(event) for event in ended] == [Evaluated, RunEnded]
    assert read_manifest(Path(caught.value.checkpoint)).state["metrics"]


def test_an_observer_that_raises_before_the_last_step_ends_the_run_at_once(tmp_path: Path) -> None:
    def early(event: Event) -> None:
        if type(event).__name__ == "StepEnded":
            raise ConnectionError("the server is away")

    with pytest.raises(ConnectionError):
        train(tmp_path, AT_END, observers=[early])
    assert not (tmp_path / "checkpoints").exists()


def test_an_observer_that_raises_in_a_run_that_was_stopped(tmp_path: Path) -> None:
    def stop(event: Event) -> Request | None:
        if type(event).__name__ == "StepEnded" and getattr(event, "step", 0) == 2:
            return Request.PREEMPT
        if isinstance(event, RunEnded):
            raise ConnectionError("the server is away")
        return None

    with pytest.raises(ConnectionError):  # it is not at its end
        train(tmp_path, AT_END, observers=[stop])
    assert train(tmp_path, AT_END, resume="auto").step == STEPS


def test_finish_that_raises(tmp_path: Path) -> None:
    def finish(module: nn.Module) -> None:
        raise OSError("no such bucket")

    with pytest.raises(FailedAfterTraining, match="`finish` failed: OSError: no such bucket"):
        train(tmp_path, AT_END, finish=finish)
    assert (tmp_path / "checkpoints" / "checkpoint-000006").is_dir()


def test_a_run_that_saves_nothing_still_hands_its_weights_out() -> None:
    found: list[dict[str, Tensor]] = []
    undisturbed = train(None, AT_END, finish=weights).finish
    with pytest.raises(FailedAfterTraining, match="nothing is saved, since fit was given no out"):
        train(None, AT_END, Broken(), finish=lambda module: found.append(weights(module)))
    assert all(torch.equal(value, found[0][name]) for name, value in undisturbed.items())


def test_a_run_that_an_observer_stopped_names_the_way_to_evaluate(tmp_path: Path) -> None:
    def stop(event: Event) -> Request | None:
        ended = type(event).__name__ == "StepEnded" and getattr(event, "step", 0) == 3
        return Request.STOP if ended else None

    with pytest.raises(FailedAfterTraining, match=r"stopped at step 3, saved .*`drivetrain eval"):
        train(tmp_path, AT_END, Broken(), observers=[stop])


def test_the_end_of_the_output_is_no_failure_of_an_observer(tmp_path: Path) -> None:
    def gone(event: Event) -> None:
        if isinstance(event, RunEnded):
            try:
                raise BrokenPipeError
            except BrokenPipeError:
                sys.exit(1)

    with pytest.raises(SystemExit):  # as with `| head`
        train(tmp_path, AT_END, observers=[gone])
