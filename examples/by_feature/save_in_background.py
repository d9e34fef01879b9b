"""Saving while training goes on: it stands still for one copy into host memory."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import CheckpointSettings, fit
from drivetrain.kernel.events import Saved

behind = CheckpointSettings(every=10, behind=True)
saves = []
result = fit(
    recipe,
    replace(settings, checkpoint=behind),
    backend="cpu",
    out="runs/behind",
    observers=[lambda event: saves.append(event) if isinstance(event, Saved) else None],
)
print(f"saved at steps {[event.step for event in saves]}; the newest is {result.checkpoint}")
