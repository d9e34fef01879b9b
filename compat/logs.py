"""The drop-in's log messages go to Python's logging, as any library's, and to the loggers where
users of transformers look for those of its Trainer.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["show"]

_OF_CALLBACKS = ("base", "flow_callbacks", "progress", "state")
"""Modules here whose counterparts are in `transformers.trainer_callback`."""


class _Show(logging.Handler):
    """Says each message on the logger of transformers that would say it there, which prints where
    nobody sets up logging. Where a script has set it up by itself it shows the message already, and
    their printing handler is left out; where neither is there, it is printed here.
    """

    def emit(self, record: logging.LogRecord) -> None:
        shown = logging.root.handlers
        theirs = sys.modules.get("transformers.utils.logging")
        if theirs is None:
            if not shown:
                print(self.format(record), file=sys.stderr)
            return
        of_callbacks = record.name.rpartition(".")[2] in _OF_CALLBACKS
        file = "trainer_callback" if of_callbacks else "trainer"
        logger = theirs.get_logger(f"transformers.{file}")
        for handler in (theirs._default_handler, *shown):  # theirs may propagate, as it does in CI
            if handler:
                handler.addFilter(_is_not_shown)
        say = getattr(logger, record.levelname.lower())
        say(record.getMessage(), exc_info=record.exc_info, extra={"is_drivetrains": True})


def _is_not_shown(record: logging.LogRecord) -> bool:
    return not (getattr(record, "is_drivetrains", False) and logging.root.handlers)


def show() -> None:
    """From here on; called when the package is imported."""
    logging.getLogger(__package__).addHandler(_Show())
