"""Register the simulated device's driver, and the facts about the device."""

from pathlib import Path

from planted_drivers import register

from drivetrain.backends.common import accelerators
from drivetrain.registry import ENTRY_POINT_GROUP

register(
    "simulated-driver",
    f"[{ENTRY_POINT_GROUP}]\nsimulated = simulated:driver\n"
    "simulated_ranks = simulated:driver_of_ranks\n"
    f"[{accelerators.ENTRY_POINT_GROUP}]\nsim = simulated:facts\n",
    Path(__file__).parent,
)
