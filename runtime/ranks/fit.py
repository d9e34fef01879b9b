"""`drivetrain.fit`, on any number of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn

from ..kernel.events import Observer
from ..kernel.paths import Url
from ..kernel.recipe import Recipe
from ..launched import adopt_slurm, is_first_rank
from ..run.notebook import NotebookProgress
from ..run.record_channel import RecordChannel
from ..run.recorded_fit import fit_recorded, refuse_used
from ..run.where_shown import in_notebook
from ..trainer.preemption_notice import passed_to_ranks
from ..trainer.recovery import launcher_for
from ..trainer.result import Result
from ..trainer.settings import Settings

__all__ = ["fit"]


def fit(
    recipe: Recipe,
    settings: Settings | None = None,
    *,
    nproc: int = 1,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | Url | None = None,
    resume: str | os.PathLike[str] | Url | None = None,
    observers: Sequence[Observer] = (),
    finish: Callable[[nn.Module], Any] | None = None,
    progress: bool | Literal["lines"] = True,
) -> Result:
    """Train `recipe` by `settings` on the driver called `backend`. Every rank calls it.

    `nproc`: 1 trains in this process, which is a rank if torchrun or `srun` started it. A larger
    number starts this many ranks from here, such as from a notebook cell. Torch's elastic agent
    forks them from this process, so everything that cells define exists in them, too. The result is
    that of rank 0; Python objects that observers collect stay in the ranks. Each rank computes on
    one CPU thread. A process that used a GPU cannot be forked, and is refused. `backend`: `auto`
    is the best driver that can run here. On ranks that are started here, it is the quickest one
    with which a large model fits (`drivetrain.planning.automatic`), and a line says which.

    `out`: the run folder, or a URL such as `s3://bucket/run`. It gets what `drivetrain train`
    writes: `config.json`, `metrics.jsonl`, `report.html` and `checkpoints/`; a folder that holds
    another run is refused. None, for a quick try, saves nothing and writes no file. `resume`: None
    starts a new training; `auto` continues from the newest complete checkpoint in `out`, if there
    is one; a path or URL is a checkpoint or a folder of them. One run at a time writes to a folder.
    `progress`: show a table in a notebook, a bar in a terminal, and plain lines elsewhere (the last
    two on stderr); `"lines"` shows plain lines everywhere. With False, warnings, skipped steps and
    failed saves are logged to the logger `drivetrain`, and nothing is shown. `observers` are called
    besides. `finish` is called at the end with the user's own module, whole and in evaluation mode,
    on every rank.

    Raises `UsageError` (the request is invalid; nothing was started), `SaveFailed` (also at the end
    of a run that could save no checkpoint), `DataFailed`,
    `CollectiveFailed`, and `RecipeFailed` if `sys.exit` is called. Other errors of the recipe are
    raised unchanged, or as `RecipeFailed` from a rank that was started here.
    """
    act = partial(
        fit_recorded,
        recipe,
        settings,
        backend=backend,
        backend_options=backend_options,
        out=out,
        resume=resume,
        observers=observers,
        finish=finish,
        progress=progress,
    )
    if nproc == 1:
        adopt_slurm(os.environ)
        return act()
    refuse_used(out, resume)
    from .start import run_on_ranks  # torch's elastic agent is slow to import

    given = settings or Settings()
    passed, launcher = passed_to_ranks(given.preemption_notice), launcher_for(given, nproc)
    if progress is not True or not in_notebook():
        with passed:
            return run_on_ranks(nproc, partial(_result_of_rank, act), time.sleep, launcher)
    with passed, NotebookProgress() as table, RecordChannel() as channel:
        act = partial(_result_of_rank, partial(act, display=channel))
        return run_on_ranks(nproc, act, partial(channel.receive, table), launcher)


def _result_of_rank(act: Callable[[], Result]) -> Result:
    """Return this rank's result; only that of rank 0 keeps `finish`."""
    result = act()
    return result if is_first_rank() else replace(result, finish=None)
