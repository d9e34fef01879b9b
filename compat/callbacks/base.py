"""Callbacks observe a run, and may request a log, an evaluation, a save or a stop.

Every event is called as `event(args, state, control, **kwargs)`, the keywords being `model`,
`processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`, with
`metrics` or `logs` where there are some. An event returns None, or a control that replaces the
current one, or a dict of flags to set: `{"should_training_stop": True}`.

Callbacks written for transformers run here unchanged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, cast

from .state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from ...trainer.step_clock import StepClock  # which imports torch

__all__ = ["CallbackHandler", "TrainerCallback", "has_listener"]

_log = logging.getLogger(__name__)

_LIBRARIES = ("drivetrain.", "transformers.")
"""Packages whose callbacks write to no weight."""
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()
_FLAGS = tuple(TrainerControl.__dataclass_fields__)

Answer = TrainerControl | Mapping[str, bool] | None


class TrainerCallback:
    """Derive from this and define the events of interest; the others do nothing."""

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called at the end of the Trainer's construction."""

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called before the first step, when everything is built, and restored if the run
        resumes."""

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called at the end, after the last log and after the best model is loaded, if
        requested."""

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called when a pass over the data begins."""

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called when a pass over the data ended, or was stopped."""

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called before the first microbatch of an update."""

    def on_substep_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called after each microbatch of an update except the last."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called before the optimizer's step, when the gradient is complete and clipped."""

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called after the optimizer's step; gradients still exist."""

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called when an update is done and counted."""

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called after a data set was evaluated, with its figures in the keyword `metrics`."""

    def on_predict(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Answer:
        """Called at the end of `predict`, with its figures in `metrics`."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called after each batch of an evaluation or prediction."""

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called when a checkpoint is complete and old ones are removed."""

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called when figures are logged, with them in the keyword `logs`."""

    def on_push_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Answer:
        """Called before a push to the hub."""


_NO_REACTIONS = frozenset(
    function for name, function in vars(TrainerCallback).items() if name.startswith("on_")
)
"""The methods of a callback that overrides nothing."""
_EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def _event(name: str, lowers: tuple[str, ...] = (), carries: str = "") -> Callable[..., Any]:
    """Make the handler's method for an event. The method resets the flags that the event answers,
    then calls the callbacks. `carries`: the keyword for a fourth positional argument.
    """

    def fire(
        self: CallbackHandler,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        *positional: Any,
        **kwargs: Any,
    ) -> TrainerControl:
        for flag in lowers:
            setattr(control, flag, False)
        if positional:
            (kwargs[carries],) = positional
        return self.call_event(name, args, state, control, **kwargs)

    fire.__name__ = name
    return fire


class CallbackHandler(TrainerCallback):
    """Calls its callbacks in order. `callbacks` is a plain list that may be edited in place.

    Its events return the control that the last callback left.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any,
        processing_class: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.clock: StepClock | None = None
        """Clock of the training, if the time of callbacks is measured."""
        self.open_to_writes: Callable[[Any, str], AbstractContextManager[Any]] = _unwrapped
        """Encloses an event of a callback, by its name, in which it may write to weights."""
        if not any(_is_default_flow(callback) for callback in self.callbacks):
            _log.warning(
                "without a DefaultFlowCallback nothing is logged, evaluated, saved or stopped; "
                "trainer.add_callback(DefaultFlowCallback) adds one. Callbacks:\n%s",
                self.callback_list,
            )

    on_init_end = _event("on_init_end")
    on_train_begin = _event("on_train_begin", lowers=("should_training_stop",))
    on_train_end = _event("on_train_end")
    on_epoch_begin = _event("on_epoch_begin", lowers=("should_epoch_stop",))
    on_epoch_end = _event("on_epoch_end")
    on_step_begin = _event("on_step_begin", lowers=("should_log", "should_evaluate", "should_save"))
    on_substep_end = _event("on_substep_end")
    on_pre_optimizer_step = _event("on_pre_optimizer_step")
    on_optimizer_step = _event("on_optimizer_step")
    on_step_end = _event("on_step_end")
    on_evaluate = _event("on_evaluate", lowers=("should_evaluate",), carries="metrics")
    on_predict = _event("on_predict", carries="metrics")
    on_prediction_step = _event("on_prediction_step")
    on_save = _event("on_save", lowers=("should_save",))
    on_log = _event("on_log", lowers=("should_log",), carries="logs")
    on_push_begin = _event("on_push_begin")

    def call_event(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call `event` of every callback; each gets the control that the previous callback left."""
        for callback in self.callbacks:
            react = getattr(callback, event)
            if getattr(react, "__func__", None) in _NO_REACTIONS:
                continue  # the usual case, several times a step
            with self._around(callback, event):
                answer = react(
                    args,
                    state,
                    control,
                    model=self.model,
                    processing_class=self.processing_class,
                    optimizer=self.optimizer,
                    lr_scheduler=self.lr_scheduler,
                    train_dataloader=self.train_dataloader,
                    eval_dataloader=self.eval_dataloader,
                    **kwargs,
                )
            if answer is not None and answer is not control:
                control = _obey(answer, control, f"{type(callback).__name__}.{event}")
        return control

    def _around(self, callback: Any, event: str) -> AbstractContextManager[Any]:
        """Return what encloses an event of a callback."""
        timed = self.clock.observing(callback) if self.clock else _NO_CONTEXT
        if type(callback).__module__.startswith(_LIBRARIES):
            return timed
        stack = ExitStack()
        stack.enter_context(timed)
        where = f"{type(callback).__name__}.{event}"
        stack.enter_context(self.open_to_writes(callback, where))
        return stack

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """Append a callback, or an instance of a class of callbacks. Raises TypeError for what
        lacks an event.
        """
        made = callback() if isinstance(callback, type) else callback
        if lacking := [event for event in _EVENTS if not hasattr(made, event)]:
            raise TypeError(
                f"{made!r} is no callback, it lacks {', '.join(lacking)}: derive it from "
                "drivetrain.compat.TrainerCallback"
            )
        if any(_same(type(present), type(made)) for present in self.callbacks):
            _log.warning(
                "a second %s joins the callbacks:\n%s", type(made).__name__, self.callback_list
            )
        self.callbacks.append(made)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return the first callback that is `callback` or an instance of it; None if
        there is none."""
        for index, present in enumerate(self.callbacks):
            if _is_a(present, callback) if isinstance(callback, type) else present == callback:
                return self.callbacks.pop(index)
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback as `pop_callback` does. Raises ValueError for an instance that was not
        added.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks:\n{self.callback_list}")


def _unwrapped(callback: Any, event: str) -> AbstractContextManager[Any]:
    """Enclose an event before a driver has wrapped the model: each write is kept."""
    return _NO_CONTEXT


def _is_default_flow(callback: Any) -> bool:
    """True for the default flow of this package, or of transformers, which does the same."""
    return any(parent.__name__ == "DefaultFlowCallback" for parent in type(callback).__mro__)


def _is_a(callback: Any, kind: type) -> bool:
    """True if a callback is an instance of a class, or of the class of the same name in
    transformers: a script that removes transformers' ProgressCallback means the one that replaces
    it here.
    """
    return isinstance(callback, kind) or any(_same(each, kind) for each in type(callback).__mro__)


def _same(kind: type, other: type) -> bool:
    """True if the classes are equal, or have the same name and one is transformers' and the other
    ours."""
    homes = {each.__module__.partition(".")[0] for each in (kind, other)}
    namesakes = kind.__name__ == other.__name__ and homes == {"transformers", "drivetrain"}
    return kind is other or namesakes


def _obey(answer: Any, control: TrainerControl, event: str) -> TrainerControl:
    """Return the control that `answer` requests. Raises TypeError for anything but a control or
    flags."""
    if isinstance(answer, Mapping):
        if strangers := [flag for flag in answer if flag not in _FLAGS]:
            raise TypeError(
                f"{event} returned the flags {strangers}, which do not exist; "
                f"there are {', '.join(_FLAGS)}"
            )
        return dataclasses.replace(control, **answer)
    if all(hasattr(answer, flag) for flag in _FLAGS):
        return cast("TrainerControl", answer)
    raise TypeError(
        f"{event} returned {answer!r}; return None, the control, or a dict of "
        f"the flags {', '.join(_FLAGS)}"
    )


def has_listener(event: str, handler: Any) -> bool:
    """True if a callback of the handler overrides this event. Also true for a handler of another
    class, which may do more than call callbacks."""
    if type(handler) is not CallbackHandler:
        return True
    for callback in handler.callbacks:
        if getattr(getattr(callback, event), "__func__", None) not in _NO_REACTIONS:
            return True
    return False
