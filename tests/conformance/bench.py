"""The driver under test, as a job finds it in its process: by name, with its options."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..kernel.contract import Driver, Session
from ..kernel.plan import Plan
from ..kernel.recipe import Recipe
from ..registry import find_driver
from ..trainer.fit import Result, fit
from ..trainer.setting_values import override
from ..trainer.settings import Settings

__all__ = ["Bench"]


@dataclass(frozen=True)
class Bench:
    """One driver with one set of options, in a process that was started as a rank."""

    backend: str
    options: Mapping[str, Any]

    @property
    def driver(self) -> Driver:
        return find_driver(self.backend)

    def plan(self, **settings: Any) -> Plan:
        """The plan that the kernel makes of these settings (dotted keys)."""
        options = override(self.driver.options_type(), self.options, "backend.")
        return override(Settings(max_grad_norm=None), settings).plan(options)

    def open(self, **settings: Any) -> AbstractContextManager[Session]:
        """Open a session under the plan of these settings."""
        return self.driver.open(self.plan(**settings))

    def fit(self, recipe: Recipe, settings: Mapping[str, Any], **arguments: Any) -> Result:
        """Call the kernel's `fit` on this driver; settings by dotted keys. The evaluation before
        the first step is off, since recipes of the suite record their calls.
        """
        return fit(
            recipe,
            override(Settings(), {"evaluate.sanity_check": False, **settings}),
            backend=self.backend,
            backend_options=self.options,
            **arguments,
        )
