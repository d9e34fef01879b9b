"""Retries of operations on a remote storage."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...kernel.errors import DrivetrainError, StorageFailed

__all__ = ["Patience"]

_LOG = logging.getLogger(__name__)
_CHANCE = random.SystemRandom()  # not the global generator, whose state belongs to the run
_REFUSALS = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_OURS = (DrivetrainError, FileNotFoundError, TypeError, ValueError, AttributeError, ImportError)

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """A number of tries, with pauses of random length whose limit doubles up to the longest pause:
    ranks that failed together do not retry together."""

    tries: int = 6
    first_pause: float = 0.5
    longest_pause: float = 20.0

    def persist(self, what: str, act: Callable[[], T]) -> T:
        """Call `act` until it succeeds, and return its result. `what`, such as `s3://b/a: cannot be
        read`, begins the message of the `StorageFailed` that is raised after the last try, or at
        once for errors that a retry would not change.

        A missing file, and errors that are not the storage's, are raised as they are.
        """
        started = time.monotonic()
        for number in range(self.tries):
            try:
                return act()
            except _OURS:
                raise
            except _REFUSALS as error:
                raise StorageFailed(f"{what}: {_words(error)}") from error
            except Exception as error:
                if number + 1 == self.tries:
                    seconds = time.monotonic() - started
                    raise StorageFailed(
                        f"{what}, tried {self.tries} times in {seconds:.0f} s: {_words(error)}"
                    ) from error
                _LOG.warning("%s, trying again: %s", what, _words(error))
                time.sleep(_CHANCE.uniform(0, self._pause(number)))
        raise AssertionError("not reached: tries is at least 1")

    def _pause(self, number: int) -> float:
        return min(self.longest_pause, self.first_pause * 2.0**number)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
