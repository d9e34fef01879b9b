"""Experiment trackers: `--track tensorboard` on the command line; wandb, mlflow and trackio go the
same way. A resumed run continues its curve.

::

    pip install tensorboard
"""

from base import recipe, settings

from drivetrain import fit
from drivetrain.trackers import Tracker

with_tracker = [Tracker("tensorboard")]
result = fit(recipe, settings, backend="cpu", out="runs/tracked", observers=with_tracker)
print("tensorboard --logdir runs/tracked")
