"""Layouts that must resume each other: all drivers, and every way to partition a model.

    python tests/backends/layouts.py FOLDER

writes the page of all pairs there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from environments import build_all, python_of_all

from drivetrain.conformance import Subject
from drivetrain.conformance.matrix import make_page, parse_subject

MIXTURE = "AdamW, mixture of experts"
"""The training: its model has tied weights, fused layers and experts."""

LAYOUTS = (
    "cpu",
    "ddp:2",
    "fsdp:2",
    "mesh:4,replicate=2",
    "deepspeed:2,stage=1",
    "deepspeed:2,stage=2",
    "deepspeed:2,stage=3",
    "xla",
    "ipex",
    "mesh:2,tensor=2",
    "mesh:4,tensor=4",
    "mesh:4,tensor=2",
    "mesh:2,context=2",
    "mesh:2,expert=2",
    "mesh:2,pipeline=2",
    "mesh:4,pipeline=2,tensor=2",
)
"""Layouts as `NAME[:PROCESSES][,OPTION=VALUE ...]`. A mesh shards over the ranks that its options
leave.
"""


def of_layout(text: str) -> Subject:
    """Return the subject of a layout, on the newest torch that it runs on."""
    if text not in ("xla", "ipex"):
        return parse_subject(text)
    build_all()
    return parse_subject(text, python_of_all())


if __name__ == "__main__":
    subjects = [of_layout(text) for text in LAYOUTS]
    raise SystemExit(make_page(Path(sys.argv[1]), subjects, "layouts", [MIXTURE]))
