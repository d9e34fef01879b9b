"""HF Trainer's events and flags between the kernel's steps, in HF's order."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...kernel.batches import Group, Position
from ...kernel.contract import Outcome
from ...kernel.events import Request, StepSkipped
from ...kernel.loop import NextAction, TrainLoop
from ...kernel.recipe import Batch, Microstep
from ...kernel.step import StepResult
from ...trainer.after_update import AfterUpdate
from ...trainer.gc_frozen import survivors_frozen
from ...trainer.module_state import ModuleState
from ...trainer.step_clock import UPDATE
from ...trainer.update_numbers import numbering
from ..callbacks.base import has_listener
from ..common.debugging import print_xla_metrics
from ..optim.schedules import follow_groups, follows_a_metric
from .between_steps import BetweenStepsMixin
from .diagnostics import Diagnostics
from .epochs import Epochs
from .time_parts import TimeParts

__all__ = ["TrainerPolicy"]

_LOG = logging.getLogger(__name__)


class _AllRanksLeave(Exception):
    """Raised when every rank requested to leave the epoch after the last step: the step that has
    begun is abandoned."""


class TrainerPolicy:
    """The kernel's `Recipe.step` and `LoopPolicy` for one call of `train`, which call the
    callbacks."""

    def __init__(
        self,
        trainer: BetweenStepsMixin,
        epochs: Epochs,
        diagnostics: Diagnostics | None,
        *,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
    ) -> None:
        self.trainer, self.epochs, self.trial = trainer, epochs, trial
        self._diagnostics = diagnostics
        self.ignore_keys, self.start_time = ignore_keys_for_eval, start_time
        self.num_items: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self.learning_rate: float | None = None
        self.preempted = self._stepped = False
        self.reason = NextAction.CONTINUE
        """The reason why the steps ended, after `run`."""
        self._leave_requested: tuple[bool, bool] | None = None
        """Requests by callbacks to leave the epoch and training; None: no request."""
        self._measures_gradients = trainer._measures_gradients()
        self.optimizer = trainer._optimizer_there_is()
        self._num_groups = len(self.optimizer.param_groups)
        self._gradients: dict[nn.Parameter, Tensor | None] = {}
        """Gradients of the last update, for a custom schedule that reads them."""
        prepared = trainer.driver_session.wrapped()
        self._engine, self._scales_loss = prepared.engine, prepared.plan.precision.loss_scaling
        self._number_next_update = numbering(self._engine)
        self._scheduler: Any = None
        self._follows_a_metric = self._reads_gradients = False
        self._hooks: list[RemovableHandle] = []
        recipe = trainer.driver_session.recipe(trainer.model, **trainer._changes_of_weights())
        driver = trainer.driver_session.driver.name
        self._after_update = AfterUpdate(recipe, self._engine, driver)
        session = trainer.driver_session.session
        self._modules: ModuleState | None = None
        if trainer._saves_kernel_checkpoints():
            self._modules = ModuleState(self._engine, session, _LOG.warning)
        times = TimeParts.of(trainer, None if diagnostics is None else diagnostics.records)
        self.times = trainer._times = times
        self.mark: Callable[[str], object] = bool if times is None else times.clock.mark
        trainer.callback_handler.clock = None if times is None else times.clock

    def close(self) -> None:
        """Remove the hooks from the optimizer, and stop the clock."""
        self._remove_hooks()
        self.trainer._times = self.trainer.callback_handler.clock = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def run(self, loop: TrainLoop) -> None:
        """Make all steps, to the end or until ranks agree to stop."""
        self._after_update.restored(loop)
        if self._modules is not None:
            self._modules.begin()
        finder = None if self.times is None else self.times.finder
        with survivors_frozen(), finder or nullcontext():
            then = self._run_epochs(loop)
        # callbacks stop a run at its last step, too
        ended = loop.progress.step >= loop.total_steps and not self.preempted
        self.reason = NextAction.FINISHED if ended else then
        if self.times is not None:
            self.times.finish(loop.progress)

    def _run_epochs(self, loop: TrainLoop) -> NextAction:
        while True:
            try:
                return loop.run()
            except _AllRanksLeave:
                epoch = loop.progress.position.epoch
            if (then := self._leave_epoch(loop, epoch)) is not NextAction.NEXT_EPOCH:
                return then
            loop.progress.position = Position(epoch + 1)

    # --- inside a step ----------------------------------------------------------------------

    def step(self, module: nn.Module, batch: Batch, microstep: Microstep) -> Tensor:
        """Run one microbatch by the Trainer's `training_step`."""
        trainer = self.trainer
        if microstep.index == 0:
            if self._leave_requested:
                self._raise_if_all_leave()
            trainer.current_gradient_accumulation_steps = microstep.num_microbatches
            self.num_items = self._count(microstep)
            trainer.control = trainer.callback_handler.on_step_begin(
                trainer.args, trainer.state, trainer.control
            )
        trainer._microstep = microstep
        try:
            loss: Tensor = trainer.training_step(module, batch, self.num_items)
        finally:
            trainer._microstep = None
        if self._diagnostics is not None:
            self._diagnostics.add(loss)
        if trainer.args.logging_nan_inf_filter:
            loss = self._filtered(loss)
        trainer.current_flos += float(trainer.floating_point_ops(batch))
        trainer._track_num_input_tokens(batch)
        if not microstep.last:
            trainer.control = trainer.callback_handler.on_substep_end(
                trainer.args, trainer.state, trainer.control
            )
        return loss

    def _count(self, microstep: Microstep) -> Tensor | None:
        """Return the items of the update for `training_step`; None if items are not counted."""
        args = self.trainer.args
        local: Tensor | None = self.epochs.counts.popleft()
        if local is None or not args.average_tokens_across_devices:
            return local
        return torch.tensor(int(microstep.num_items()), device=args.device)

    def _filtered(self, loss: Tensor) -> Tensor:
        """Return the loss, or the mean loss since the last log if it is not finite."""
        if loss.is_cpu and math.isfinite(loss.item()):
            return loss
        training, state = self.trainer._running(), self.trainer.state
        steps = 1 + state.global_step - self.trainer._globalstep_last_logged
        mean = torch.as_tensor(training.window.loss_sum / steps, device=loss.device)
        return torch.where(torch.isfinite(loss), loss, mean.to(loss.dtype))

    # --- around the optimizer's step ----------------------------------------------------------

    def _hook(self) -> None:
        """Hook the optimizer's step while a callback listens to it. Hooks cost more than this check
        in each step."""
        handler = self.trainer.callback_handler
        wanted = (
            self._measures_gradients
            or self._reads_gradients
            or has_listener("on_pre_optimizer_step", handler)
            or has_listener("on_optimizer_step", handler)
        )
        if wanted and not self._hooks:
            optimizer, clips = self.optimizer, self.trainer.driver_session.clips
            before = [self._measure] if self._measures_gradients and not clips else []
            self._hooks = [
                *(optimizer.register_step_pre_hook(hook) for hook in before),
                optimizer.register_step_pre_hook(self._before_optimizer_step),
                optimizer.register_step_post_hook(self._after_optimizer_step),
            ]
        elif self._hooks and not wanted:
            self._remove_hooks()

    def _measure(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.grad_norm = self.trainer._own_grad_norm()

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepped, trainer = True, self.trainer
        trainer.control = trainer.callback_handler.on_pre_optimizer_step(
            trainer.args, trainer.state, trainer.control
        )

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        trainer = self.trainer
        if self._reads_gradients:
            groups = self.optimizer.param_groups
            self._gradients |= {p: p.grad for group in groups for p in group["params"]}
        trainer.control = trainer.callback_handler.on_optimizer_step(
            trainer.args, trainer.state, trainer.control
        )

    # --- between steps (see `LoopPolicy`) ----------------------------------------------------

    def before_update(self, loop: TrainLoop) -> None:
        self._stepped, trainer = False, self.trainer
        trainer._last_outcome = None
        if trainer.lr_scheduler is not self._scheduler:
            self._look_at(trainer.lr_scheduler)
        groups = self.optimizer.param_groups
        if len(groups) != self._num_groups:
            self._num_groups = len(groups)
            trainer.driver_session.follow_groups()
            follow_groups(trainer.lr_scheduler, groups)
        self._hook()
        self.learning_rate = trainer._get_learning_rate()
        for theirs, ours in zip(self._engine.param_groups, groups, strict=False):
            theirs["lr"] = ours["lr"]  # if a driver has its own groups
        if self._diagnostics is not None:
            self._diagnostics.before_update(loop)
        self._number_next_update(loop)
        self.mark(UPDATE)

    def after_step(self, loop: TrainLoop, group: Group, result: StepResult) -> NextAction:
        trainer, state = self.trainer, self.trainer.state
        if trainer._lock is not None:
            trainer._lock.check()
        if not (self._measures_gradients and self._stepped):
            self.grad_norm = result.outcome.grad_norm
        elif trainer.driver_session.clips:  # the driver clips, and the norm is read afterwards
            self.grad_norm = trainer._own_grad_norm()
        if self._hooks and not self._stepped:  # a skipped step calls the callbacks like any other
            self._before_optimizer_step(self.optimizer, (), {})
            self._after_optimizer_step(self.optimizer, (), {})
        self._after_update.run(loop)
        if self._diagnostics is not None:
            self._diagnostics.after_step(loop, group, self.num_items, result.loss)
        if self._modules is not None:
            self._modules.after_step()
        if self.times is not None and not self.times.has_begun:
            self.times.begin(loop.progress)
        trainer._last_outcome = result.outcome
        self._advance_schedule(result.outcome)
        state.global_step = loop.progress.step
        done = self.epochs.batches_done(group)
        state.epoch = group.position.epoch + done / self.epochs.batches_per_epoch
        trainer.control = trainer.callback_handler.on_step_end(trainer.args, state, trainer.control)
        agreed = loop.agreed(result)
        if agreed[Request.PREEMPT]:
            self.preempted = trainer.control.should_save = trainer.control.should_training_stop = (
                True
            )
        self.act(loop, group.position.epoch)
        wanted = self._wanted()
        ended = group.next.epoch > group.position.epoch
        if not (ended or agreed[Request.STOP]):
            if not any(wanted):
                return NextAction.CONTINUE
            if not self._decides_alone(loop):
                self._leave_requested = wanted
                loop.requests.ask(Request.STOP)  # counted by the next tally
                return NextAction.CONTINUE
        then = self._leave_epoch(loop, group.position.epoch)
        return NextAction.CONTINUE if ended and then is NextAction.NEXT_EPOCH else then

    # --- the end of an epoch, on which ranks agree ---------------------------------------------

    def _wanted(self) -> tuple[bool, bool]:
        """Return whether callbacks set the flags to leave the epoch and training."""
        control = self.trainer.control
        return bool(control.should_epoch_stop), bool(control.should_training_stop)

    def _decides_alone(self, loop: TrainLoop) -> bool:
        """True if this rank is alone, or all ranks know the decision already."""
        last = loop.progress.step >= loop.total_steps
        return loop.session.world.size == 1 or last or self.preempted

    def _raise_if_all_leave(self) -> None:
        """Raise `_AllRanksLeave` if every rank requested to leave the epoch. Called before the
        forward of the next step: one rank cannot leave alone, since others wait for it in this
        step."""
        loop = self.trainer._running()
        if loop.stepper.sums()[1 + Request.STOP] == loop.session.world.size:
            raise _AllRanksLeave

    def _leave_epoch(self, loop: TrainLoop, epoch: int) -> NextAction:
        """End the epoch on all ranks, and return what follows."""
        self._end_epoch(loop, epoch)
        if not self._decides_alone(loop):
            self._agree(loop)
        self.epochs.counts.clear()  # drop the counts of a group that was read ahead
        if self.trainer.control.should_training_stop:
            return NextAction.PREEMPTED if self.preempted else NextAction.STOPPED
        return NextAction.NEXT_EPOCH

    def _agree(self, loop: TrainLoop) -> None:
        """Stop training if one rank requested it. Warn if not all ranks requested what all then
        do."""
        asked, self._leave_requested = self._leave_requested or (False, False), None
        mine = [now or before for now, before in zip(self._wanted(), asked, strict=True)]
        ranks = loop.session.exchange(mine)
        for flag, wanted in zip(("epoch", "training"), zip(*ranks, strict=True), strict=True):
            if any(wanted) and not all(wanted):
                which = ", ".join(str(rank) for rank, each in enumerate(wanted) if each)
                _LOG.warning(
                    "callbacks of rank %s of %s alone stopped %s: it ends on all ranks, after step "
                    "%s. Set control.should_%s_stop on every rank alike",
                    which,
                    len(wanted),
                    "the epoch" if flag == "epoch" else flag,
                    loop.progress.step,
                    flag,
                )
        self.trainer.control.should_training_stop = any(training for _, training in ranks)

    def _end_epoch(self, loop: TrainLoop, epoch: int) -> None:
        trainer = self.trainer
        trainer.control = trainer.callback_handler.on_epoch_end(
            trainer.args, trainer.state, trainer.control
        )
        self.act(loop, epoch)
        print_xla_metrics(trainer.args, trainer.driver_session)

    def act(self, loop: TrainLoop, epoch: int) -> None:
        """Log, evaluate and save by the flags."""
        trainer = self.trainer
        trainer._maybe_log_save_evaluate(
            torch.as_tensor(loop.window.loss_sum),
            self.grad_norm,
            trainer.model_wrapped,
            self.trial,
            epoch,
            self.ignore_keys,
            self.start_time,
            learning_rate=self.learning_rate,
        )

    def skipped(self, loop: TrainLoop, event: StepSkipped, group: Group) -> None:
        _LOG.warning(
            "step %s was not applied: its loss is %s and its gradient norm %s (%s in a row). The "
            "weights and the optimizer are as before it",
            event.step,
            event.loss,
            event.grad_norm,
            event.in_a_row,
        )
        if self._diagnostics is not None:
            self._diagnostics.skipped(event, group)

    def _look_at(self, scheduler: Any) -> None:
        """Inspect a schedule once, and not in each step."""
        self._scheduler, self._follows_a_metric = scheduler, follows_a_metric(scheduler)
        library = type(scheduler).__module__.partition(".")[0]
        self._reads_gradients = library not in ("torch", "drivetrain")

    def _advance_schedule(self, outcome: Outcome) -> None:
        scheduler: Any = self.trainer.lr_scheduler
        gradients, self._gradients = self._gradients, {}
        if self._follows_a_metric:
            return
        if self._scales_loss and not outcome.applied():
            return
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        scheduler.step()
        for parameter in gradients:
            parameter.grad = None
