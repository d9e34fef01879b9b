"""The options of `drivetrain train` that stand for something else. It imports nothing."""

from __future__ import annotations

__all__ = ["MEETING", "SHORTHANDS", "TORCHRUN"]

SHORTHANDS = {
    "steps": "steps",
    "epochs": "epochs",
    "seed": "seed",
    "overfit": "data.overfit",
    "detect_anomaly": "detect_anomaly",
    "stats": "stats.every",
    "preemption_notice": "preemption_notice",
}
"""The setting that each option is short for."""
MEETING = (
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
)
"""Options handed to torchrun by which several nodes find each other."""
TORCHRUN = (*MEETING, "rdzv_conf", "local_addr", "max_restarts", "monitor_interval")
"""Options handed to torchrun; `--nproc` and `--nnodes` are not among them."""
