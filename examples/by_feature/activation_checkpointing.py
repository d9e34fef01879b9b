"""Activation checkpointing: modules of the classes that are named are run again in backward instead
of keeping what they computed. The gradient stays the same."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import fit

kept = fit(recipe, settings, backend="cpu")
again = fit(recipe, replace(settings, activation_checkpointing=("Linear",)), backend="cpu")
print(f"kept: {kept.loss:.6f}, computed again: {again.loss:.6f}")
