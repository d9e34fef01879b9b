"""What one rank's tensors took at their most: `python measured.py RECIPE.py BACKEND STAGE`.

Prints the bytes that were allocated for tensors at the fullest moment of a run, above those before
it, whoever allocated them: libraries in C++ too. Resident memory would tell of the allocator of the
host, of pages that were never written, and of whatever else the machine is doing.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from drivetrain import fit
from drivetrain.cli.recipe_file import load_recipe_file


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
