"""Weights for other libraries: safetensors, as they read it; and back, as the start of a run."""

from pathlib import Path

from base import recipe, settings
from safetensors.torch import load_file

from drivetrain import fit
from drivetrain.checkpoint import export_weights

trained = fit(recipe, settings, backend="cpu", out="runs/export")
export_weights(trained.checkpoint, Path("exported"))
weights = {}
for file in Path("exported").glob("*.safetensors"):
    weights |= load_file(file)
print({name: tuple(weight.shape) for name, weight in weights.items()})
