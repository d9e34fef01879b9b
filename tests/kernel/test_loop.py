"""Behaviour of `fit` for its user, on the cpu driver."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer.problems import Pairs, build, everything, recipe, squared_error

from drivetrain import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    OptimizerSettings,
    Recipe,
    Settings,
)
from drivetrain.kernel.errors import (
    BackendUnavailable,
    CapabilityRefused,
    CheckpointMismatch,
    CheckpointNotFound,
    DataError,
    NonFiniteTraining,
    RecipeError,
    RecipeFailed,
    SaveFailed,
    SettingError,
    UnknownBackend,
)
from drivetrain.kernel.events import (
    Evaluated,
    Event,
    Logged,
    Request,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    StepEnded,
    StepSkipped,
)
from drivetrain.trainer.digests import StepDigests
from drivetrain.trainer.fit import fit as kernel_fit
from drivetrain.trainer.memory_account import MemoryCounted
from drivetrain.trainer.time_accounting import TimeSpent

SHORT = Settings(steps=12, global_batch=8, micro_batch=3, log_every=5)


def fit(*args: Any, **kwargs: Any) -> tuple[Any, list[Event]]:
    events: list[Event] = []
    observers = [events.append, *kwargs.pop("observers", ())]
    return kernel_fit(*args, backend="cpu", observers=observers, **kwargs), events


def of(kind: type, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in of(Logged, events)}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def test_a_run_in_fifteen_lines_learns(tmp_path: Path) -> None:
    settings = Settings(
        epochs=20, global_batch=10, log_every=50, optimizer=OptimizerSettings(lr=0.03)
    )
    result, events = fit(recipe(), settings, out=tmp_path)
    assert result.reason == "finished"
    assert result.step == 100
    assert result.metrics["held_out"]["loss"] < losses(events)[50]
    assert result.checkpoint == tmp_path / "checkpoints" / "checkpoint-000100"


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("where", ["loss", "observer"])
def test_sys_exit_is_no_end_of_a_run(where: str, code: int) -> None:
    def leave(*_: object) -> Any:
        sys.exit(code)

    left = dataclasses.replace(recipe(), loss=leave) if where == "loss" else recipe()
    observers = [leave] if where == "observer" else []
    with pytest.raises(RecipeFailed, match=rf"sys\.exit\({code}\) was called"):
        kernel_fit(left, Settings(steps=2), backend="cpu", observers=observers)


def test_the_order_of_events(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        SHORT,
        steps=4,
        log_every=2,
        evaluate=EvaluateSettings(every=2),
        checkpoint=CheckpointSettings(every=4),
    )
    _, events = fit(recipe(), settings, out=tmp_path)
    assert [type(event) for event in events] == [
        RunStarted,
        *(MemoryCounted, StepEnded, StepEnded, Logged, StepDigests, Evaluated),
        *(StepEnded, StepEnded, Logged, StepDigests, Saved, Evaluated),
        *(TimeSpent, RunEnded),
    ]


def test_accumulation_and_ragged_groups_do_not_change_the_curve() -> None:
    def curve(micro_batch: int | None) -> dict[int, float]:
        settings = Settings(epochs=2, global_batch=8, micro_batch=micro_batch, log_every=1)
        return losses(fit(recipe(), settings)[1])

    whole = curve(None)
    assert len(whole) == 14  # 50 samples: six groups of 8 and one of 2, twice
    for micro_batch in (1, 3, 5):
        assert curve(micro_batch) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("save_at", "workers"),
    [
        *((save_at, 0) for save_at in (3, 7, 10)),
        (7, 2),
        *(pytest.param(save_at, 2, marks=pytest.mark.slow) for save_at in (3, 10)),
    ],
)
def test_a_resumed_run_is_bit_equal(tmp_path: Path, save_at: int, workers: int) -> None:
    what = recipe(dropout=0.3, noise=0.1)
    settings = dataclasses.replace(
        SHORT,
        data=DataSettings(workers=workers),
        checkpoint=CheckpointSettings(every=save_at, keep_last=10),
        evaluate=EvaluateSettings(every=2),
    )
    whole, events = fit(what, settings, out=tmp_path / "whole")
    first = tmp_path / "whole" / "checkpoints" / f"checkpoint-{save_at:06d}"
    again, resumed = fit(what, settings, out=tmp_path / "again", resume=first)
    assert_same(everything(whole.checkpoint), everything(again.checkpoint))
    assert losses(resumed) == {
        step: loss for step, loss in losses(events).items() if step > save_at
    }


def test_a_resumed_optimizer_gets_its_learning_rate(tmp_path: Path) -> None:
    fit(recipe(), dataclasses.replace(SHORT, steps=4), out=tmp_path)
    _, events = fit(recipe(), SHORT, out=tmp_path, resume="auto")
    _, whole = fit(recipe(), SHORT)
    rates = [{e.step: e.learning_rate for e in of(Logged, run)} for run in (events, whole)]
    assert rates[0][12] == rates[1][12]


def test_resume_auto_starts_at_step_0_in_an_empty_folder(tmp_path: Path) -> None:
    result, events = fit(recipe(), SHORT, out=tmp_path, resume="auto")
    assert result.step == 12
    assert not of(Resumed, events)


def test_a_finished_run_resumes_to_do_nothing(tmp_path: Path) -> None:
    fit(recipe(), SHORT, out=tmp_path)
    result, events = fit(recipe(), SHORT, out=tmp_path, resume="auto")
    assert result.step == 12
    assert not of(StepEnded, events)
    assert not of(Saved, events)


def test_resume_prints_what_changed(tmp_path: Path) -> None:
    fit(recipe(), SHORT, out=tmp_path)
    longer = dataclasses.replace(SHORT, steps=14, global_batch=4)
    _, events = fit(recipe(), longer, out=tmp_path, resume="auto")
    (resumed,) = of(Resumed, events)
    assert resumed.notes == ("steps was 12, is 14", "global_batch was 8, is 4")


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint in"):
        fit(recipe(), SHORT, out=tmp_path / "a", resume=tmp_path)


def test_a_checkpoint_of_another_model_names_the_tensors(tmp_path: Path) -> None:
    fit(recipe(), SHORT, out=tmp_path)
    other = dataclasses.replace(
        recipe(), model=lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    )
    with pytest.raises(CheckpointMismatch) as caught:
        fit(other, SHORT, out=tmp_path, resume="auto")
    for words in (
        "0.weight: (8, 4) in the checkpoint, (16, 4) in the model",
        "only in the checkpoint: 3.weight (1, 8)",
        "only in the model: 2.weight (1, 16)",
    ):
        assert words in str(caught.value)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    what = recipe(dropout=0.3, noise=0.1)
    often = dataclasses.replace(SHORT, evaluate=EvaluateSettings(every=1, micro_batch=4))
    never = dataclasses.replace(SHORT, evaluate=EvaluateSettings(at_end=False))
    with_it, _ = fit(what, often, out=tmp_path / "often")
    without, _ = fit(what, never, out=tmp_path / "never")
    assert_same(everything(with_it.checkpoint), everything(without.checkpoint))


@pytest.mark.parametrize("micro_batch", [1, 4, 13, 100])
def test_evaluation_is_exact_for_every_remainder(micro_batch: int) -> None:
    settings = dataclasses.replace(SHORT, evaluate=EvaluateSettings(micro_batch=micro_batch))
    result, _ = fit(recipe(), settings, finish=lambda module: module)
    data = Pairs(13)
    with torch.no_grad():
        expected = squared_error(result.finish, (data.inputs, data.targets)) / 13
    assert result.metrics["held_out"]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_metrics_of_ones_own_are_made_of_sums() -> None:
    def measure(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        error = (module(batch[0]) - batch[1]).abs()
        return {"close": (error < 1).sum(), "error": error.sum()}

    def summarise(sums: Any) -> dict[str, float]:
        assert sums["samples"].dtype == torch.float64
        return {"share_close": float(sums["close"] / sums["samples"])}

    what = dataclasses.replace(recipe(), measure=measure, summarise=summarise)
    result, _ = fit(what, SHORT)
    (value,) = result.metrics["held_out"].values()
    assert round(value * 13) == pytest.approx(value * 13)


def test_a_step_that_is_not_finite_is_shown_and_not_applied(tmp_path: Path) -> None:
    settings = dataclasses.replace(SHORT, log_every=1, data=DataSettings(shuffle=False))
    result, events = fit(recipe(poison={17: math.inf}), settings, out=tmp_path)
    assert [event.step for event in of(StepSkipped, events)] == [3, 10]
    assert not math.isfinite(losses(events)[3])
    clean = [loss for step, loss in losses(events).items() if step not in (3, 10)]
    assert all(math.isfinite(loss) for loss in clean)
    assert all(torch.isfinite(tensor).all() for tensor in everything(result.checkpoint).values())
    rates = {event.step: event.learning_rate for event in of(Logged, events)}
    assert rates[4] == rates[3]  # the clock did not tick


def test_only_such_steps_end_the_run() -> None:
    poison = dict.fromkeys(range(50), math.nan)
    settings = dataclasses.replace(SHORT, max_nonfinite=4)
    with pytest.raises(NonFiniteTraining, match=r"step 4: loss nan.* no step could be applied"):
        fit(recipe(poison=poison), settings)
    optimizer = OptimizerSettings(name="torch.optim.SGD", lr=1e15)
    wild = dataclasses.replace(settings, optimizer=optimizer, max_grad_norm=None)
    with pytest.raises(NonFiniteTraining, match=r"4 steps in a row .*Lower optimizer\.lr"):
        fit(recipe(), wild)


def test_items_weigh_the_loss() -> None:
    what = dataclasses.replace(recipe(), count_items=lambda batch: 2 * len(batch[0]), eval_data={})
    _, single = fit(dataclasses.replace(recipe(), eval_data={}), SHORT)
    _, double = fit(what, SHORT)
    assert losses(double)[5] == pytest.approx(losses(single)[5] / 2, rel=0.2)
    assert of(Logged, double)[0].items == 2 * of(Logged, single)[0].items


@pytest.mark.parametrize(
    ("request_", "event"), [(Request.LOG, Logged), (Request.EVALUATE, Evaluated)]
)
def test_an_observer_may_ask(request_: Request, event: type) -> None:
    def asks(seen: Event) -> Request | None:
        return request_ if isinstance(seen, StepEnded) and seen.step == 3 else None

    _, events = fit(recipe(), SHORT, observers=[asks])
    assert 3 in [seen.step for seen in of(event, events)]


def test_an_observer_may_stop_the_run(tmp_path: Path) -> None:
    def asks(seen: Event) -> Request | None:
        return Request.STOP if isinstance(seen, StepEnded) and seen.step == 3 else None

    result, events = fit(recipe(), SHORT, out=tmp_path, observers=[asks])
    assert (result.reason, result.step) == ("stopped", 3)
    assert of(Saved, events)[-1].step == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_stops_at_the_next_boundary(tmp_path: Path, number: int) -> None:
    before = signal.getsignal(number)

    def kills(seen: Event) -> None:
        if isinstance(seen, StepEnded) and seen.step == 3:
            os.kill(os.getpid(), number)

    result, _ = fit(recipe(), SHORT, out=tmp_path, observers=[kills])
    assert (result.reason, result.step) == ("preempted", 3)
    assert result.checkpoint.name == "checkpoint-000003"
    assert signal.getsignal(number) == before
    assert fit(recipe(), SHORT, out=tmp_path, resume="auto")[0].step == 12


def test_a_run_of_which_nothing_can_be_saved_goes_on_to_its_end_and_says_so(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(SaveFailed, match=r"finished at step .* None of the checkpoints"):
        fit(recipe(), SHORT, out=tmp_path)
    strict = dataclasses.replace(SHORT, checkpoint=CheckpointSettings(stop_on_error=True))
    with pytest.raises(SaveFailed):
        fit(recipe(), strict, out=tmp_path)


def no_gradient(module: nn.Module, batch: Any) -> Tensor:
    return squared_error(module, batch).detach()


def of_its_own(module: nn.Module, batch: Any) -> Tensor:
    return torch.zeros((), requires_grad=True)


def not_summed(module: nn.Module, batch: Any) -> Tensor:
    return module(batch[0]) - batch[1]


def not_a_tensor(module: nn.Module, batch: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"train_data": None}, RecipeError, "no train_data"),
        ({"train_data": []}, DataError, "holds no samples"),
        ({"train_data": 5}, DataError, "neither indexed"),
        ({"eval_data": {"x": []}}, DataError, "evaluation data set 'x' is empty"),
        ({"model": lambda: 3}, RecipeError, "recipe.model returned int"),
        ({"model": nn.Tanh}, RecipeError, "no parameter that requires a gradient"),
        ({"loss": no_gradient}, RecipeError, "without a gradient"),
        ({"loss": of_its_own}, RecipeError, "a tensor of its own.* For a batch without targets"),
        ({"loss": not_summed}, RecipeError, r"shape \(3, 1\)"),
        ({"loss": not_a_tensor}, RecipeError, "returned float"),
        ({"measure": lambda module, batch: {"x": 1.0}}, RecipeError, "measure returned"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fit(dataclasses.replace(recipe(), **changes), SHORT)


def test_a_data_set_smaller_than_one_global_batch_is_refused() -> None:
    settings = dataclasses.replace(SHORT, global_batch=64, data=DataSettings(drop_last=True))
    with pytest.raises(DataError, match=r"50 samples.*64"):
        fit(recipe(), settings)


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(UnknownBackend, match=r"'cpus'. Did you mean 'cpu'"):
        kernel_fit(recipe(), SHORT, backend="cpus")


def test_a_device_in_place_of_a_backend_is_answered_with_what_runs() -> None:
    with pytest.raises(UnknownBackend, match=r"'CUDA'. That is a device, .* 'auto' is 'cpu' here"):
        kernel_fit(recipe(), SHORT, backend="CUDA")


def test_what_a_driver_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CapabilityRefused) as caught:
        fit(recipe(), SHORT)
    assert (caught.value.capability, caught.value.driver) == ("multi_process", "cpu")
    assert not issubclass(BackendUnavailable, CapabilityRefused)


def test_finish_gets_the_users_own_module_in_evaluation_mode() -> None:
    def finish(module: nn.Module) -> tuple[bool, str]:
        return module.training, type(module).__name__

    result, _ = fit(recipe(dropout=0.5), SHORT, finish=finish)
    assert result.finish == (False, "Sequential")


def test_compile_and_recomputed_activations_give_the_same_curve() -> None:
    what = recipe()
    _, plain = fit(what, SHORT)
    checkpointed = dataclasses.replace(SHORT, activation_checkpointing=("Linear",))
    assert losses(fit(what, checkpointed)[1]) == losses(plain)
    with pytest.raises(RecipeError, match="pattern 'Blok' matches no submodule"):
        fit(what, dataclasses.replace(SHORT, activation_checkpointing=("Blok",)))


def test_a_copy_of_a_model_that_recomputes_has_weights_of_its_own() -> None:
    def finish(module: nn.Module) -> list[bool]:
        copied, inputs = copy.deepcopy(module), next(iter(Pairs(1)))[0]
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        with torch.enable_grad():
            return [bool(each(inputs).any()) for each in (module, copied)]

    checkpointed = dataclasses.replace(SHORT, activation_checkpointing=("Linear",))
    assert fit(recipe(), checkpointed, finish=finish)[0].finish == [True, False]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.02)])
def test_mixed_precision_stays_near_the_full_one(precision: str, tolerance: float) -> None:
    _, full = fit(recipe(), SHORT)
    result, mixed = fit(recipe(), dataclasses.replace(SHORT, precision=precision))
    skipped = {event.step for event in of(StepSkipped, mixed)}
    assert precision == "fp16" or not skipped
    if not skipped:
        assert losses(mixed) == pytest.approx(losses(full), rel=tolerance)
    assert math.isfinite(result.metrics["held_out"]["loss"])


def test_a_recipe_may_bring_its_own_optimizer() -> None:
    seen: list[str] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        seen.extend(name for name, _ in pairs)
        return torch.optim.SGD([parameter for _, parameter in pairs], lr=0.1)

    what = Recipe(model=build, loss=squared_error, train_data=Pairs(), optimizer=optimizer)
    _, events = fit(what, SHORT)
    assert seen == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert of(Logged, events)[0].learning_rate <= 0.1


def test_an_overflowed_loss_with_a_finite_gradient_is_not_applied(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        SHORT, log_every=1, max_grad_norm=None, data=DataSettings(shuffle=False)
    )
    # the square overflows; its gradient, twice the error, does not
    _, events = fit(recipe(poison={17: 1e30}), settings)
    assert of(StepSkipped, events)[0].step == 3


def test_fewer_steps_than_were_done_are_refused(tmp_path: Path) -> None:
    fit(recipe(), SHORT, out=tmp_path)
    fewer = dataclasses.replace(SHORT, steps=5)
    with pytest.raises(SettingError, match=r"steps is 5, and .* is at step 12 already"):
        fit(recipe(), fewer, out=tmp_path, resume="auto")


def test_the_last_steps_before_a_stop_are_logged(tmp_path: Path) -> None:
    def asks(seen: Event) -> Request | None:
        return Request.PREEMPT if isinstance(seen, StepEnded) and seen.step == 8 else None

    _, events = fit(recipe(), SHORT, out=tmp_path, observers=[asks])
    assert list(losses(events)) == [5, 8]
    _, resumed = fit(recipe(), SHORT, out=tmp_path, resume="auto")
    _, whole = fit(recipe(), SHORT)
    assert losses(resumed) == {step: losses(whole)[step] for step in (10, 12)}


def test_a_recipe_may_take_over_the_microbatch() -> None:
    seen: list[tuple[int, int, bool, float]] = []

    def step(module: nn.Module, batch: Any, microstep: Any) -> Tensor:
        with microstep.autocast():
            loss = squared_error(module, batch) / microstep.num_items()
        seen.append(
            (microstep.index, microstep.num_microbatches, microstep.last, microstep.num_items())
        )
        return microstep.backward(loss)

    mine = dataclasses.replace(recipe(), step=step)
    _, usual = fit(recipe(), SHORT)
    _, taken_over = fit(mine, SHORT)
    assert losses(taken_over) == pytest.approx(losses(usual), rel=1e-6)
    assert seen[:3] == [(0, 3, False, 8.0), (1, 3, False, 8.0), (2, 3, True, 8.0)]


def test_a_weight_is_as_exact_as_its_loss() -> None:
    """Mix losses of several kinds and weights in one update: each must count as if it
    were alone.
    """
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    differences: list[Tensor] = []

    def step(module: nn.Module, batch: Any, microstep: Any) -> Tensor:
        losses = [
            (squared_error(module, batch).to(kind), weight)
            for weight in (1 / 3, 0.7)
            for kind in kinds
        ]
        parts = [(loss, weight, microstep.backward(loss, weight)) for loss, weight in losses]
        differences.extend(part - loss.detach() * weight for loss, weight, part in parts[1::3])
        assert all(part.dtype == torch.float32 for *_, part in (parts[0], parts[2]))
        return parts[0][2]

    fit(dataclasses.replace(recipe(), step=step), SHORT)
    assert differences and not any(differences)  # in float64, so a weight of float32 would show
