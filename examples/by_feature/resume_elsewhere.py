"""Resuming on another driver: `ddp` continues from a checkpoint of `cpu`. The same holds for any
two drivers, at any number of processes."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import fit

first = fit(recipe, replace(settings, epochs=2), backend="cpu", out="runs/moved")
second = fit(recipe, settings, backend="ddp", out="runs/moved", resume="auto")
print(f"cpu until step {first.step}, ddp until step {second.step}")
