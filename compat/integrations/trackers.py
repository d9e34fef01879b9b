"""Trackers: receivers of logs besides the screen, by their names in `report_to`. They are
transformers' own callbacks, unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ..arguments.report_to import installed_trackers
from ..callbacks.flow_callbacks import DEFAULT_CALLBACKS
from ..callbacks.progress import default_progress_callback
from ..theirs import theirs

__all__ = ["all_callbacks", "reporting_callbacks"]


def all_callbacks(args: Any, users: Iterable[Any] | None) -> list[Any]:
    """Return a Trainer's callbacks in order: the default flow, the trackers, the user's, and the
    progress display.
    """
    progress = default_progress_callback(args.disable_tqdm)
    return [*DEFAULT_CALLBACKS, *reporting_callbacks(args), *(users or ()), progress]


def reporting_callbacks(args: Any) -> list[Any]:
    """Return a callback for each name in `args.report_to`: "none" or "all", a name, or a list of
    names.

    Raises ValueError for an unknown name, and the tracker's own error if it is not installed.
    """
    if getattr(args, "replay_step", None) is not None:
        return []  # which would take a replay for the run
    names = args.report_to or []
    names = [names] if isinstance(names, str) else list(names)
    if not names or "none" in names:
        return []  # without transformers, which takes seconds to import
    known = theirs("integrations.integration_utils", "INTEGRATION_TO_CALLBACK")
    if "all" in names:
        names = installed_trackers()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"report_to={unknown}: there is {', '.join(sorted(known))}")
    callbacks = [known[name]() for name in names]
    for callback in callbacks:
        if type(callback).__name__ == "TensorBoardCallback" and getattr(args, "logging_dir", None):
            callback.logging_dir = os.path.expanduser(args.logging_dir)
    return callbacks
