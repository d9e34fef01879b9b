"""Observers, which others call callbacks: any callable that takes an event. What it returns, a
`Request`, all ranks do at the end of the same step."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import EvaluateSettings, fit
from drivetrain.kernel.events import Evaluated, Logged, Request

losses = []


def keep_losses(event):
    if isinstance(event, Logged):
        losses.append(event.loss)


def stop_when_good(event):
    is_good = isinstance(event, Evaluated) and event.metrics["loss"] < 0.6
    return Request.STOP if is_good else None


often = replace(settings, epochs=50, log_every=5, evaluate=EvaluateSettings(every=10))
result = fit(recipe, often, backend="cpu", observers=[keep_losses, stop_when_good])
print(f"{result.reason} at step {result.step}; losses {losses}")
