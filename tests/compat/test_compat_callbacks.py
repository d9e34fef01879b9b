"""The handler, the default flow, early stopping and progress: compared with transformers' own."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers
from side_by_side import both
from transformers import trainer_callback as theirs

from drivetrain import compat as ours
from drivetrain.compat import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from drivetrain.compat.callbacks.progress import _in_notebook, default_progress_callback

KEYWORDS = {
    "model",
    "processing_class",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    "eval_dataloader",
}
EVENTS = [name for name in dir(theirs.TrainerCallback) if name.startswith("on_")]
PASSED = {"on_evaluate": "metrics", "on_predict": "metrics", "on_log": "logs"}


def arguments(**changes: Any) -> SimpleNamespace:
    values = {
        "logging_strategy": "no",
        "logging_first_step": False,
        "eval_strategy": "no",
        "eval_delay": 0,
        "save_strategy": "no",
        "greater_is_better": False,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }
    return SimpleNamespace(**{**values, **changes})


def handler(*callbacks: Any, default_flow: bool = True) -> CallbackHandler:
    first = [DefaultFlowCallback] if default_flow else []
    return CallbackHandler([*first, *callbacks], "model", "tokenizer", "optimizer", "schedule")


class Recorder(TrainerCallback):
    """Records each event and its keywords."""

    def __init__(self, answer: Callable[[Any], Any] = lambda control: None) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.answer = answer

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.seen.append((name, kwargs))
            return self.answer(control)

        return event


@pytest.mark.row("B7", "B8", "B19")
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_every_callback_with_its_keywords(event: str) -> None:
    first, second = Recorder(), Recorder()
    chain = handler(first, second)
    assert isinstance(chain, TrainerCallback)
    more = ({"loss": 1.0},) if event in PASSED else ()
    control = TrainerControl()
    assert getattr(chain, event)(arguments(), TrainerState(max_steps=9), control, *more) is control
    assert first.seen == second.seen
    [(name, kwargs)] = first.seen
    assert name == event
    assert set(kwargs) == KEYWORDS | {PASSED[e] for e in [event] if e in PASSED}
    assert (kwargs["model"], kwargs["processing_class"]) == ("model", "tokenizer")
    if event in PASSED:
        assert kwargs[PASSED[event]] is more[0]


@pytest.mark.row("B17", "B18")
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_lowers_the_flags_that_theirs_lowers(event: str) -> None:
    flags = list(TrainerControl.__dataclass_fields__)
    assert flags == list(theirs.TrainerControl.__dataclass_fields__)
    more = ({},) if event in PASSED else ()
    left = []
    for library in (ours, theirs):
        control = library.TrainerControl(**dict.fromkeys(flags, True))
        made = theirs.CallbackHandler if library is theirs else CallbackHandler
        chain = made([], None, None, None, None)
        getattr(chain, event)(arguments(), TrainerState(), control, *more)
        left.append({flag: getattr(control, flag) for flag in flags})
    assert left[0] == left[1]


def test_new_phases_lower_flags() -> None:
    control = TrainerControl(True, True, True, True, True)
    control._new_training()
    assert control == TrainerControl(False, True, True, True, True)
    control._new_epoch()
    assert control == TrainerControl(False, False, True, True, True)
    control._new_step()
    assert control == TrainerControl()


@pytest.mark.row("B1")
def test_callbacks_are_classes_or_instances() -> None:
    instance = Recorder()
    chain = handler(Recorder, instance)
    assert chain.callback_list == "DefaultFlowCallback\nRecorder\nRecorder"
    assert chain.callbacks[2] is instance
    with pytest.raises(TypeError, match="is no callback, it lacks on_init_end"):
        chain.add_callback(print)


@pytest.mark.row("B3", "B4", "B5", "B26")
def test_adding_and_taking_out(caplog: pytest.LogCaptureFixture) -> None:
    first, second = EarlyStoppingCallback(), EarlyStoppingCallback()
    chain = handler(first)
    with caplog.at_level(logging.WARNING):
        chain.add_callback(second)
    assert "a second EarlyStoppingCallback" in caplog.text
    assert chain.callbacks[1:] == [first, second]
    assert chain.pop_callback(second) is second
    assert chain.pop_callback(second) is None
    assert chain.pop_callback(EarlyStoppingCallback) is first
    assert chain.pop_callback(EarlyStoppingCallback) is None
    chain.remove_callback(EarlyStoppingCallback)
    with pytest.raises(ValueError, match="not among the callbacks"):
        chain.remove_callback(first)
    chain.remove_callback(DefaultFlowCallback)
    assert chain.callbacks == []


@pytest.mark.row("B4", "B5", "B26")
@pytest.mark.parametrize("name", ["ProgressCallback", "PrinterCallback", "DefaultFlowCallback"])
def test_their_classes_name_what_stands_here(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = getattr(theirs, name)
    bars = {"disable_tqdm": name == "PrinterCallback"}
    for side in both(tmp_path):
        trainer = side.trainer(**bars)
        assert type(trainer.pop_callback(kind)).__name__ == name
        assert trainer.pop_callback(kind) is None
        before = trainer.callback_handler.callback_list
        trainer = side.trainer(**bars)
        trainer.remove_callback(kind)
        assert trainer.callback_handler.callback_list == before
        assert name not in before
    trainer = both(tmp_path)[0].trainer(**bars)
    trainer.add_callback(kind)
    assert f"a second {name}" in caplog.text
    with pytest.raises(ValueError, match="not among the callbacks"):
        trainer.remove_callback(kind())


@pytest.mark.row("B2", "B26", "B27")
def test_after_install_their_classes_are_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require the same classes, since a script may look for them by `isinstance`."""
    for library in ("trl", "sentence_transformers", "setfit"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    names = ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback")
    before = [getattr(theirs, name) for name in names]
    ours.install()
    try:
        for name, bars in zip(names, ({}, {}, {"disable_tqdm": False}), strict=True):
            callbacks = both(tmp_path)[1].trainer(**bars).callback_handler.callbacks
            for place in (transformers, transformers.trainer, theirs):
                assert any(isinstance(each, getattr(place, name)) for each in callbacks)
    finally:
        ours.uninstall()
    assert [getattr(theirs, name) for name in names] == before


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    "kind", [DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback]
)
def test_a_subclass_calls_an_event_as_it_calls_theirs(kind: type, event: str) -> None:
    """Call `super().on_log(args, state, control, logs)`: arguments may be positional, as in
    transformers.
    """

    def by_place(event: Callable[..., Any]) -> list[str]:
        parameters = inspect.signature(event).parameters.values()
        return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    wanted = by_place(getattr(getattr(theirs, kind.__name__), event))
    assert by_place(getattr(kind, event))[: len(wanted)] == wanted


@pytest.mark.row("B3")
def test_a_message_is_said_on_the_logger_that_says_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in both(tmp_path):
        said: list[str] = []
        monkeypatch.setattr(theirs.logger, "warning", lambda text, *_, s=said, **__: s.append(text))
        side.trainer(callbacks=[Recorder(), Recorder()])
        assert len(said) == 1 and "Recorder" in said[0]


@pytest.mark.row("B6")
def test_without_the_default_flow_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chain = handler(default_flow=False)
        assert "without a DefaultFlowCallback" in caplog.text
        caplog.clear()
        handler(theirs.DefaultFlowCallback, default_flow=False)
        assert not caplog.text
    state = TrainerState(global_step=9, max_steps=9)
    args = arguments(logging_strategy="steps", eval_strategy="steps", save_strategy="steps")
    assert chain.on_step_end(args, state, TrainerControl()) == TrainerControl()


@pytest.mark.row("B9")
def test_the_last_returned_control_wins() -> None:
    given, replaced = TrainerControl(), TrainerControl(should_save=True)
    chain = handler(Recorder(lambda c: replaced), Recorder(lambda c: None))
    assert chain.on_epoch_end(arguments(), TrainerState(), given) is replaced


@pytest.mark.row("B10")
def test_a_dict_sets_flags() -> None:
    chain = handler(
        Recorder(lambda c: {"should_training_stop": True}), Recorder(lambda c: {"should_log": True})
    )
    control = chain.on_step_end(arguments(), TrainerState(max_steps=9), TrainerControl())
    assert control == TrainerControl(should_training_stop=True, should_log=True)


@pytest.mark.row("B10")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"should_stop": True}, r"Recorder.on_step_end returned the flags \['should_stop'\]"),
        (True, "Recorder.on_step_end returned True"),
    ],
)
def test_what_is_no_control_is_refused(answer: Any, message: str) -> None:
    chain = handler(Recorder(lambda control: answer))
    with pytest.raises(TypeError, match=message):
        chain.on_step_end(arguments(), TrainerState(max_steps=9), TrainerControl())


@pytest.mark.row("B20", "E21", "G4")
@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("delay", [0, 3])
def test_the_default_flow_decides_as_theirs(strategy: str, first: bool, delay: int) -> None:
    args = arguments(
        logging_strategy=strategy,
        logging_first_step=first,
        eval_strategy=strategy,
        eval_delay=delay,
        save_strategy=strategy,
    )
    for step in range(1, 9):
        asked = []
        for library in (ours, theirs):
            state = library.TrainerState(
                global_step=step, max_steps=8, logging_steps=2, eval_steps=3, save_steps=4
            )
            state.epoch = step / 2
            flow, control = library.DefaultFlowCallback(), library.TrainerControl()
            control = flow.on_step_end(args, state, control)
            control = flow.on_epoch_end(args, state, control)
            asked.append(control.state())
        assert asked[0] == asked[1]


@pytest.mark.row("E21")
def test_the_old_profile_does_not_force_the_last_evaluation() -> None:
    args = arguments(eval_strategy="steps", profile="4.47")
    state = TrainerState(global_step=2, max_steps=2, eval_steps=10)
    assert not DefaultFlowCallback().on_step_end(args, state, TrainerControl()).should_evaluate
    state.eval_steps = 2
    assert DefaultFlowCallback().on_step_end(args, state, TrainerControl()).should_evaluate


def test_save_strategy_best_saves_at_no_step_of_its_own() -> None:
    state = TrainerState(global_step=8, max_steps=8, save_steps=4)
    control = DefaultFlowCallback().on_step_end(
        arguments(save_strategy="best"), state, TrainerControl()
    )
    assert control == TrainerControl(should_training_stop=True)


@pytest.mark.row("B21")
@pytest.mark.parametrize("greater", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.3, -1.0])
@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_counts_as_theirs(greater: bool, threshold: float, patience: int) -> None:
    args = arguments(eval_strategy="steps", greater_is_better=greater)
    counts = []
    for library in (ours, theirs):
        callback = library.EarlyStoppingCallback(patience, threshold)
        state, control, seen = library.TrainerState(), library.TrainerControl(), []
        for value in (5.0, 4.0, 4.5, 4.6, 3.9, 3.0):
            callback.on_evaluate(args, state, control, metrics={"eval_loss": value})
            seen.append((callback.early_stopping_patience_counter, control.should_training_stop))
            better = state.best_metric is None or (value > state.best_metric) == greater
            state.best_metric = value if better else state.best_metric
        counts.append(seen)
    assert counts[0] == counts[1]


@pytest.mark.row("B21")
def test_early_stopping_says_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    callback, state, control = EarlyStoppingCallback(), TrainerState(), TrainerControl()
    for wrong in (arguments(metric_for_best_model=None), arguments()):
        with pytest.raises(ValueError, match="early stopping"):
            callback.on_train_begin(wrong, state, control)
    args = arguments(eval_strategy="epoch", load_best_model_at_end=False)
    with caplog.at_level(logging.WARNING):
        callback.on_train_begin(args, state, control)
        assert "not with the best" in caplog.text
        callback.on_evaluate(args, state, control, metrics={"eval_f1": 1.0})
    assert "there is no eval_loss in ['eval_f1']" in caplog.text
    assert control == TrainerControl()


@pytest.mark.row("B23", status="differs", note="the dict that train() returns keeps total_flos")
def test_the_printer_prints_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs = {"loss": 1.23456789, "total_flos": 5.0, "epoch": 1}
    PrinterCallback().on_log(arguments(), TrainerState(), TrainerControl(), logs=logs)
    mine = capsys.readouterr().out
    theirs.PrinterCallback().on_log(None, TrainerState(), TrainerControl(), logs=dict(logs))
    assert mine == capsys.readouterr().out
    assert "total_flos" in logs
    state = TrainerState(is_local_process_zero=False)
    PrinterCallback().on_log(arguments(), state, TrainerControl(), logs=logs)
    assert capsys.readouterr().out == ""


@pytest.mark.row("B22", "B28")
@pytest.mark.parametrize("main", [True, False])
def test_the_bar_shows_what_theirs_shows(main: bool, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for library in (ours, theirs):
        bar, control = library.ProgressCallback(max_str_len=5), None
        state = TrainerState(max_steps=2, is_world_process_zero=main)
        bar.on_train_begin(None, state, control)
        state.global_step = 1
        bar.on_step_end(None, state, control)
        for _ in range(2):
            bar.on_prediction_step(None, state, control, eval_dataloader=[1, 2])
        assert (bar.prediction_bar is not None) == main
        if main:
            assert (bar.training_bar.n, bar.prediction_bar.n, bar.prediction_bar.total) == (1, 2, 2)
            assert not bar.prediction_bar.leave
        bar.on_evaluate(None, state, control, metrics={})
        assert bar.prediction_bar is None
        logs = {"loss": 1.23456789, "total_flos": 5.0, "name": "long text", "epoch": 1}
        bar.on_log(None, state, control, logs=logs)
        if main or library is ours:  # theirs closes a bar that it never opened
            bar.on_train_end(None, state, control)
        shown.append(capsys.readouterr().out.partition("[")[0])
    assert ("1.235" in shown[0]) == main
    assert shown[0] == shown[1]


def test_a_stream_has_no_bar_for_its_batches() -> None:
    bar = ProgressCallback()
    bar.on_prediction_step(None, TrainerState(), TrainerControl(), eval_dataloader=iter([1]))
    assert bar.prediction_bar is None


@pytest.mark.row("B24")
def test_how_progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_progress_callback(disable_tqdm=True) is PrinterCallback
    assert default_progress_callback(disable_tqdm=None) is ProgressCallback
    monkeypatch.setattr("drivetrain.compat.callbacks.progress._in_notebook", lambda: True)
    for name in ("IPython", "IPython.display"):  # absent here, imported by their table
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert default_progress_callback(disable_tqdm=False).__name__ == "NotebookProgressCallback"


@pytest.mark.row("B24")
def test_a_notebook_is_a_process_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _in_notebook()
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert _in_notebook()
    shell.config = {"TerminalIPythonApp": {}}
    assert not _in_notebook()


def test_their_callbacks_run_on_our_handler() -> None:
    chain = handler(
        theirs.EarlyStoppingCallback(1), theirs.PrinterCallback, theirs.DefaultFlowCallback
    )
    args = arguments(eval_strategy="steps")
    state, control = TrainerState(max_steps=4, best_metric=1.0), TrainerControl()
    for event in EVENTS:
        more = ({"eval_loss": 2.0},) if event in PASSED else ()
        control = getattr(chain, event)(args, state, control, *more)
    assert chain.callbacks[1].early_stopping_patience_counter == 1
