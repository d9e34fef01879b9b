"""Mixed precision: matrix products in bfloat16, weights and sums in float32. `fp16` scales the
loss besides. A driver that cannot do it refuses, before anything has started."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import fit

result = fit(recipe, replace(settings, precision="bf16"), backend="cpu")
print(f"loss {result.loss:.3f}")
