"""fit, on as many ranks as are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..kernel.events import Observer
from ..kernel.paths import Url
from ..kernel.recipe import Recipe
from ..trainer.fit import fit as fit_here
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
) -> Result:
    """Train `recipe` as `settings` say on the driver called `backend`; every rank calls it.

    `nproc`: 1 trains in this process, which is a rank where a launcher started it. More starts so
    many ranks from here, a cell of a notebook for instance: forks of this process, so that what
    cells define is theirs, too, by torch's elastic agent. The result is that of rank 0; what
    observers collect in objects of Python stays in the ranks. Each rank computes on one thread of
    the CPU. A process that used a GPU cannot be forked, and is refused.

    `out`: the run folder, where checkpoints go (`checkpoints/checkpoint-000100`), or a URL such as
    `s3://bucket/run`; None saves nothing. `resume`: None starts a new training; `auto` continues
    from the newest complete checkpoint in `out`, if there is one; a path or URL is a checkpoint or
    a folder of them. One run at a time writes to a folder. `finish` is called at the end with the
    user's own module, whole and in evaluation mode, on every rank.

    Raises `UsageError` (something asked for is not possible; nothing was started), `SaveFailed`,
    `DataFailed`, `CollectiveFailed`, and `RecipeFailed` where `sys.exit` is called; other errors of
    the recipe are raised unchanged, from a rank that was started here as `RecipeFailed`.
    """
    act = partial(
        fit_here,
        recipe,
        settings,
        backend=backend,
        backend_options=backend_options,
        out=out,
        resume=resume,
        observers=observers,
        finish=finish,
    )
    if nproc == 1:
        return act()
    from .start import run_on_ranks  # torch's elastic agent takes a while to import

    return run_on_ranks(nproc, partial(_result_of_rank, act))


def _result_of_rank(act: Callable[[], Result]) -> Result:
    """What is handed over: rank 0's is the one that counts."""
    result = act()
    return result if os.environ["RANK"] == "0" else replace(result, finish=None)
