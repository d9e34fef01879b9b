"""Random seeds, and the settings under which a run repeats bit for bit."""

from __future__ import annotations

import os
import random

__all__ = ["enable_full_determinism", "set_seed"]

_DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUDA_LAUNCH_BLOCKING": "1",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy, and torch on every device. `seed`: 0 .. 2**32 - 1.

    `deterministic`: an operation that cannot be repeated then raises RuntimeError.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # of the host and of all accelerators
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and use only algorithms that can be repeated, in the whole process.

    `warn_only`: an operation without a deterministic algorithm warns instead of raising
    RuntimeError. The environment variables for CUDA libraries and others are set here.
    """
    import torch

    set_seed(seed)
    os.environ.update(_DETERMINISTIC_ENVIRONMENT)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
