"""The argument `report_to`: names of the trackers that a run reports to."""

from __future__ import annotations

import os
from typing import Any

from ..theirs import theirs

__all__ = ["installed_trackers", "trackers_of"]

_KUBEFLOW = ["kubeflow"]


def trackers_of(report_to: Any) -> list[str]:
    """Return the names of the trackers in `report_to`; "all" selects the installed ones."""
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    if names == ["all"]:
        names = installed_trackers()
    asked = [name for name in names if name != "none"] + _KUBEFLOW * _in_kubeflow()
    return list(dict.fromkeys(asked))


def _in_kubeflow() -> bool:
    """True in a TrainJob of Kubeflow, to which progress is always reported."""
    refused = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    return "KUBEFLOW_TRAINER_SERVER_URL" in os.environ and not refused


def installed_trackers() -> list[str]:
    """Return the trackers whose packages are installed."""
    names: list[str] = theirs(
        "integrations.integration_utils", "get_available_reporting_integrations"
    )()
    return names
