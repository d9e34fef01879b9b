"""A trained model learns on by changes of low rank; whole weights are exported."""

from dataclasses import replace

from base import recipe, settings
from safetensors.torch import load_file

from drivetrain import fit, lora
from drivetrain.checkpoint import export_weights

changed = replace(recipe, model=lambda: lora(recipe.model(), "0", rank=4))
result = fit(changed, settings, backend="cpu", out="runs/lora")
assert result.checkpoint is not None
weights = load_file(export_weights(result.checkpoint, "whole") / "model.safetensors")
recipe.model().load_state_dict(weights)
print({name: tuple(weight.shape) for name, weight in weights.items()})
