"""A channel for records from a forked rank to the process that shows them."""

from __future__ import annotations

import json
import threading
import time
from multiprocessing import Pipe
from types import TracebackType

from .notebook import NotebookProgress
from .records import Record

__all__ = ["RecordChannel"]

_STEP_SECONDS = 0.25


class RecordChannel:
    """A pipe of JSON. The process that creates it receives; a forked rank sends, since a fork has
    no channel to the notebook."""

    def __init__(self) -> None:
        self._receiving, self._sending = Pipe(duplex=False)
        self._one_sends = threading.Lock()
        self._stepped_at = 0.0

    def sink(self, record: Record) -> None:
        """Send a record."""
        with self._one_sends:
            self._sending.send_bytes(json.dumps(record).encode())

    def step(self, step: int) -> None:
        """Send the number of the step that is done, a few times a second."""
        if time.monotonic() - self._stepped_at >= _STEP_SECONDS:
            self._stepped_at = time.monotonic()
            self.sink({"step": step})

    def __enter__(self) -> RecordChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sending.close()
        self._receiving.close()

    def leave(self) -> None:
        """Close the sending end in a process that sends nothing."""
        self._sending.close()

    def receive(self, display: NotebookProgress, seconds: float) -> None:
        """Wait at most `seconds` for records, and show all that were received."""
        while self._receiving.poll(seconds):
            try:
                record = json.loads(self._receiving.recv_bytes())
            except EOFError:  # all ranks have ended
                time.sleep(seconds)
                return
            if "event" not in record:
                display.step(record["step"])
                continue
            if record["event"] == "run_started":
                self.leave()  # all ranks have been forked: their ends alone stay open
            display.sink(record)
            seconds = 0
