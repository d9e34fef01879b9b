"""Uploads to the Hugging Face Hub, by huggingface_hub."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Push", "hub_api", "quiet_uploads"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def quiet_uploads() -> Iterator[None]:
    """Hide progress bars of huggingface_hub, which would break the bar of the training."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass
class Push:
    """Uploads in the background."""

    jobs: list[Future[Any]] = field(default_factory=list)

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait for all uploads, and log those that failed; training continues."""
        wait(self.jobs)
        for error in filter(None, (job.exception() for job in self.jobs)):
            _log.error("an upload to the Hub failed: %s", error)
        self.jobs = []


def hub_api() -> Any:
    """Return the client of the Hub. Raises ImportError if huggingface_hub is missing."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError("the Hub is reached by: pip install huggingface_hub") from error
    return HfApi()
