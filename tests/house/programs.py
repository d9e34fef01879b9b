"""Programs in folders that are not installed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from house_rules import ROOT


def program(name: str, folder: str = "docs") -> ModuleType:
    """Import `FOLDER/NAME.py`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
