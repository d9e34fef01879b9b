"""Errors of the compat layer, which are both drivetrain's errors and of the type that HF Trainer
raises.

Code written for HF catches `ValueError` or `TypeError`, and the command line catches
`SettingError`; both work.
"""

from __future__ import annotations

from ..kernel.errors import CapabilityRefused, SettingError

__all__ = ["ArgumentError", "ArgumentRefused", "UnknownArgument"]


class ArgumentError(SettingError, ValueError):
    """An argument has an invalid value, or contradicts another argument."""


class UnknownArgument(SettingError, TypeError):
    """An argument does not exist, or was removed and has no meaning here."""


class ArgumentRefused(CapabilityRefused, ValueError):
    """The chosen driver cannot do what an argument asks for; see `capability` and `driver`."""
