"""Registers faulty drivers as any package registers its own: by an entry point."""

import sys
import tempfile
from pathlib import Path

from drivetrain.kernel.registry import ENTRY_POINT_GROUP

_folder = tempfile.TemporaryDirectory()
_info = Path(_folder.name) / "faulty_driver-0.dist-info"
_info.mkdir()
(_info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-driver\nVersion: 0\n")
(_info / "entry_points.txt").write_text(
    f"[{ENTRY_POINT_GROUP}]\nfaulty = faulty:driver\nunavailable = faulty:unavailable\n"
    "faulty-mesh = faulty_mesh:driver\n"
)

# the ranks that a harness starts take over this path, so they find the driver by its name
_own = Path(__file__).parent
sys.path += [_folder.name, str(_own), str(_own.parent / "backends")]  # there is what they forget
