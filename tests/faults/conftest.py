"""Register the faulty drivers."""

from pathlib import Path

from planted_drivers import register

from drivetrain.registry import ENTRY_POINT_GROUP

register(
    "faulty-driver",
    f"[{ENTRY_POINT_GROUP}]\nfaulty = faulty:driver\nunavailable = faulty:unavailable\n"
    "faulty-mesh = faulty_mesh:driver\n",
    Path(__file__).parent,
)
