"""A trace of steps 5 and 6, for https://ui.perfetto.dev; `--profile 5:7` on the command line. Other
steps cost nothing."""

from pathlib import Path

from base import recipe, settings

from drivetrain import fit
from drivetrain.trainer.profiler import Profiler

folder = Path("runs/profiled")
fit(recipe, settings, backend="cpu", observers=[Profiler(5, 7, folder)])
written = sorted(path.name for path in folder.iterdir())
print(written)
