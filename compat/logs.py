"""Log messages of compat go to Python's logging, and to the loggers of transformers' Trainer, where
its users expect them.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["set_verbosity", "show"]

_OF_CALLBACKS = ("base", "flow_callbacks", "progress", "state")
"""Modules of compat whose counterparts are in `transformers.trainer_callback`."""


class _ForwardingHandler(logging.Handler):
    """Passes each message to the corresponding logger of transformers, which prints if logging is
    not configured. If a script has configured logging, the message is shown already, and
    transformers' printing handler is skipped. Without either, the message is printed here.
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
        for handler in (theirs._default_handler, *shown):  # it may propagate, as in CI
            if handler:
                handler.addFilter(_is_not_shown)
        say = getattr(logger, record.levelname.lower())
        say(record.getMessage(), exc_info=record.exc_info, extra={"is_drivetrains": True})


def _is_not_shown(record: logging.LogRecord) -> bool:
    return not (getattr(record, "is_drivetrains", False) and logging.root.handlers)


def show() -> None:
    """Start to show messages; called when the package is imported."""
    logging.getLogger(__package__).addHandler(_ForwardingHandler())


def set_verbosity(level: int) -> None:
    """Show messages of drivetrain's Trainer from `level` of `logging` on, and those of
    transformers, if it is in use.
    """
    logging.getLogger("drivetrain.compat").setLevel(level)
    if "transformers" in sys.modules:
        from transformers.utils import logging as theirs

        theirs.set_verbosity(level)
