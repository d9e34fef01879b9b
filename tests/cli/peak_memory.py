"""Peak memory of one rank's tensors: `python peak_memory.py RECIPE.py BACKEND STAGE`.

Prints the bytes allocated for tensors at the peak of a run, minus those before it. Allocations of
C++ libraries count, too. Resident memory is not used: it depends on the host's allocator, on pages
that were never written, and on other processes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from drivetrain.cli.settings.recipe_file import load_recipe_file
from drivetrain.trainer.fit import fit


def main(recipe_path: str, backend: str, stage: str) -> None:
    options: dict[str, Any] = {"stage": int(stage)} if stage != "-" else {}
    file = load_recipe_file(Path(recipe_path))
    recipe = file.build(None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        fit(recipe, file.settings, backend=backend, backend_options=options)
    found: Any = record.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    print(max(itertools.accumulate(event.nbytes() for event in events)))


if __name__ == "__main__":
    main(*sys.argv[1:])
