"""The argument `debug`: XLA's counters."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["is_debugged", "print_xla_metrics"]


def is_debugged(args: Any, what: str) -> bool:
    """True if `debug` holds a word."""
    return what in [str(getattr(word, "value", word)) for word in args.debug or ()]


def print_xla_metrics(args: Any, session: Any) -> None:
    """With `tpu_metrics_debug`, print on the first rank how often XLA compiled, ran and copied, and
    for how long.
    """
    if session.driver.name != "xla" or not is_debugged(args, "tpu_metrics_debug"):
        return
    if args.process_index == 0:
        print(import_module("torch_xla.debug.metrics").metrics_report())
