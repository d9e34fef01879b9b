"""The names `Layout` and `EstimatesLayout`, as drivers have imported them so far."""

from __future__ import annotations

from ..kernel.optional import EstimatesLayout
from ..kernel.plan import Layout

__all__ = ["EstimatesLayout", "Layout"]
