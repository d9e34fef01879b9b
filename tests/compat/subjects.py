"""Drivers whose ranks train by the drop-in. What that imports is imported once for all ranks."""

from __future__ import annotations

from functools import partial

from drivetrain.conformance.subject import Subject

__all__ = ["subject"]

subject = partial(Subject, imports=("side_by_side",))
