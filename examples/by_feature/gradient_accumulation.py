"""Gradient accumulation: it follows from `micro_batch`, the most that one forward may hold. The
gradient stays the same, also where the parts are uneven, as 30 in parts of 8 are."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import fit

whole = fit(recipe, settings, backend="cpu")
parts = fit(recipe, replace(settings, micro_batch=8), backend="cpu")
print(f"whole: {whole.loss:.6f}, in parts: {parts.loss:.6f}")
