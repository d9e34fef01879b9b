"""Resuming: `resume="auto"` starts a run if the folder is empty, and otherwise continues from
its newest checkpoint. The bits are those of a run that was never interrupted."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import fit

half = replace(settings, epochs=2)
schedule = replace(settings.schedule, name="constant")
half, whole = replace(half, schedule=schedule), replace(settings, schedule=schedule)

first = fit(recipe, half, backend="cpu", out="runs/resumed", resume="auto")
second = fit(recipe, whole, backend="cpu", out="runs/resumed", resume="auto")
uninterrupted = fit(recipe, whole, backend="cpu")
print(f"steps {first.step}, {second.step}: {second.metrics} and {uninterrupted.metrics}")
