"""Saving in the background: training only waits for one copy into host memory."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import CheckpointSettings, fit
from drivetrain.kernel.events import Saved

background = CheckpointSettings(every=10, background=True)
saves = []
result = fit(
    recipe,
    replace(settings, checkpoint=background),
    backend="cpu",
    out="runs/background",
    observers=[lambda event: saves.append(event) if isinstance(event, Saved) else None],
)
print(f"saved at steps {[event.step for event in saves]}; the newest is {result.checkpoint}")
