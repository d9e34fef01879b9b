"""The same from Python: train, resume for more steps, look. `python examples/python_api.py`."""

from dataclasses import replace

import digits

from drivetrain import fit

recipe, settings, one = digits.recipe(), digits.settings, {"threads": 1}
first = fit(recipe, settings, backend="cpu", backend_options=one, out="runs/digits", resume="auto")
print(f"step {first.step}: {first.metrics['held_out']}")

longer = replace(settings, epochs=12)
more = fit(recipe, longer, backend="cpu", backend_options=one, out="runs/digits", resume="auto")
print(f"step {more.step}: {more.metrics['held_out']}, saved in {more.checkpoint}")
