"""Errors of the compat layer: drivetrain's, and at once of the type that HF Trainer raises.

Code written for HF catches `ValueError` or `TypeError`, and the command line catches
`SettingError`; both are right.
"""

from __future__ import annotations

from ..kernel.errors import CapabilityRefused, SettingError

__all__ = ["ArgumentError", "ArgumentRefused", "UnknownArgument"]


class ArgumentError(SettingError, ValueError):
    """An argument has a value that cannot be, or that contradicts another's."""


class UnknownArgument(SettingError, TypeError):
    """An argument of a name that does not exist, or that was removed and has no meaning here."""


class ArgumentRefused(CapabilityRefused, ValueError):
    """The chosen driver cannot do what an argument asks for; see `capability` and `driver`."""
