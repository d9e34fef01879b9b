"""Where the drop-in's log messages go: to Python's logging, as any library's, and where users of
transformers look for those of its Trainer.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["show"]

_PLACES = ("transformers.trainer", "transformers")
"""The logger of their Trainer, and the library's, which prints where nobody sets up logging."""


class _Show(logging.Handler):
    """Hands each message to the handlers of transformers' loggers. Where a script has set up
    logging by itself it shows the message already, and their printing handler is left out; where
    neither is there, it is printed here.
    """

    def emit(self, record: logging.LogRecord) -> None:
        shown = logging.root.handlers
        theirs = sys.modules.get("transformers.utils.logging")
        if theirs is None:
            if not shown:
                print(self.format(record), file=sys.stderr)
            return
        if not theirs.get_logger(_PLACES[0]).isEnabledFor(record.levelno):
            return
        besides = [*shown, theirs._default_handler] if shown else []
        for handler in [each for name in _PLACES for each in logging.getLogger(name).handlers]:
            if handler not in besides and record.levelno >= handler.level:
                handler.handle(record)


def show() -> None:
    """From here on; called when the package is imported."""
    logging.getLogger(__package__).addHandler(_Show())
