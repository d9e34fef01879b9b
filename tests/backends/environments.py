"""The second environment of the tests: torch 2.8, with all drivers but `xpu`.

torch_xla and intel-extension-for-pytorch need torch 2.8, and the tests themselves run on the newest
torch. uv builds this environment beside the first one, from the same pins.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-all"
EXTRAS = ("xla", "ipex", "deepspeed", "test")
LEFT_OUT = ("not-xla", "not-ipex")
TOO_NEW = ("torchao",)
"""Packages that cannot be imported with torch 2.8. The tests that run there do without them."""
OPTIONS_OF_ALL = [
    *(f"--extra={name}" for name in EXTRAS),
    *(f"--no-group={name}" for name in LEFT_OUT),
    *(f"--no-install-package={name}" for name in TOO_NEW),
]
"""Options with which uv makes the environment."""

WORLDS = (
    "cpu",
    "ddp:2",
    "ddp:3",
    "fsdp:2",
    "fsdp:3",
    "deepspeed:2,stage=1",
    "deepspeed:2,stage=2",
    "deepspeed:2,stage=3",
    "deepspeed:3,stage=3",
    "xla",
    "xla,devices=2",
    "ipex",
)
"""Worlds that run in the environment, as `NAME[:PROCESSES][,OPTION=VALUE ...]`."""


def python_of_all() -> str:
    """Return the environment's interpreter, whether or not it has been made yet."""
    return str(FOLDER / "bin" / "python")


@functools.cache
def build_all() -> None:
    """Make or complete the environment; processes that ask at once wait for the first."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise RuntimeError("the tests of xla and ipex need uv to build their environment")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
        "UV_PROJECT_ENVIRONMENT": str(FOLDER),
    }
    with (ROOT / ".venv-all.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            [uv, "sync", "--quiet", "--python", version, *OPTIONS_OF_ALL],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if made.returncode:
        raise RuntimeError(f"uv could not build the environment of all drivers:\n{made.stderr}")
