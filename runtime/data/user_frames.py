"""Errors of the user's code, shown without ours around it."""

from __future__ import annotations

import sysconfig
import traceback
from itertools import compress
from types import FrameType

__all__ = ["last_line", "user_frames"]

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def last_line(error: BaseException) -> str:
    """The last line that Python prints of an error: its type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def user_frames(error: BaseException) -> str:
    """The traceback that Python prints above it, from the user's first frame on and without
    drivetrain's; the same for the errors that caused it. Empty for an error of drivetrain's
    alone."""
    shown = traceback.TracebackException.from_exception(error)
    _cut(shown, error)
    if not (shown.stack or shown.__cause__ or shown.__context__ or isinstance(error, SyntaxError)):
        return ""
    lines = list(shown.format())
    if getattr(shown, "exceptions", None) is None:  # a group is shown with its own last line
        last = list(shown.format_exception_only())
        lines[-len(last) :] = [line for line in last if line.startswith(" ")]
    return "".join(lines).rstrip()


def _cut(shown: traceback.TracebackException, error: BaseException) -> None:
    shown.stack[:] = compress(
        shown.stack, _kept([f for f, _ in traceback.walk_tb(error.__traceback__)])
    )
    for name in ("__cause__", "__context__"):
        earlier, cause = getattr(shown, name), getattr(error, name)
        if earlier is not None and cause is not None:
            _cut(earlier, cause)


def _kept(frames: list[FrameType]) -> list[bool]:
    """Marks the frames to show: from the user's first one on, or after drivetrain's last one
    where a library raised."""
    ours = [_is_ours(frame) for frame in frames]
    users = [not (own or _is_library(frame)) for frame, own in zip(frames, ours, strict=True)]
    behind_ours = len(ours) - ours[::-1].index(True) if True in ours else 0
    first = users.index(True) if True in users else behind_ours
    return [number >= first and not own for number, own in enumerate(ours)]


def _is_ours(frame: FrameType) -> bool:
    """Or Python's own way of importing, which it leaves out, too."""
    module = str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] in (_PACKAGE, "importlib")


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return "site-packages" in path or path.startswith(_LIBRARIES)
