"""Find the weight that a failing line of the user's code writes to."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

__all__ = ["written_in"]

_LIBRARIES = ("torch.", __package__.partition(".")[0] + ".")
_WRITES = re.compile(r"aten\.\w+_\.")
"""An operation that writes to its first argument, in a message of torch."""


def written_in(error: BaseException, module: nn.Module) -> str:
    """Return the FQN of the weight that the failing line writes to, or the line itself if it writes
    to something else. Empty for a line that does not write."""
    frame = _user_frame(error)
    if frame is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for target in _targets(line):
        if (name := names.get(id(_value_of(target, frame)))) is not None:
            return name
    return repr(line) if _WRITES.search(str(error)) else ""


def _user_frame(error: BaseException) -> FrameType | None:
    """Return the innermost frame of neither torch nor drivetrain."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if not str(trace.tb_frame.f_globals.get("__name__")).startswith(_LIBRARIES):
            found = trace.tb_frame
        trace = trace.tb_next
    return found


def _targets(line: str) -> Iterator[ast.expr]:
    """Yield what methods that write are called on: `a.b` in `a.b.data.mul_(2).add_(c)`."""
    try:
        tree = ast.parse(f"{line} pass" if line.endswith(":") else line)
    except SyntaxError:  # a part of a statement of several lines
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=target, attr=method)) if method.endswith("_"):
                yield _without_calls(target)


def _without_calls(target: ast.expr) -> ast.expr:
    match target:
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Attribute(value=inner, attr="data"):
            return _without_calls(inner)
    return target


def _value_of(target: ast.expr, frame: FrameType) -> Any:
    """Look up names, their attributes and numbered parts in a frame; None for anything else."""
    match target:
        case ast.Name(id=name):
            return frame.f_locals.get(name)
        case ast.Attribute(value=inner, attr=name):
            return getattr(_value_of(inner, frame), name, None)
        case ast.Subscript(value=inner, slice=ast.Constant(value=int(index))):
            part = _value_of(inner, frame)
            return part[index] if isinstance(part, nn.ModuleList | nn.ParameterList) else None
    return None
