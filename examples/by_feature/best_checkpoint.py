"""The best checkpoint is kept beside the newest: by any metric of any evaluation data set, here
`held_out.loss`."""

from dataclasses import replace
from pathlib import Path

from base import recipe, settings

from drivetrain import CheckpointSettings, EvaluateSettings, fit
from drivetrain.checkpoint import list_checkpoints

kept = CheckpointSettings(every=10, keep_last=1, keep_best=1, best_metric="held_out.loss")
evaluated = replace(settings, checkpoint=kept, evaluate=EvaluateSettings(every=10))
fit(recipe, evaluated, backend="cpu", out="runs/best")
left = list_checkpoints(Path("runs/best/checkpoints")).complete
print(f"left: {[found.folder.name for found in left]}")
