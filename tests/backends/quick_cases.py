"""The quick cases of a driver. `cpu` and `ddp` run each check with all of its arguments. The other
drivers run each check with some of them.
"""

from __future__ import annotations

import math
from typing import Any

from drivetrain.conformance import Case

ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "problem": ("regression", "classification", "dropout"),
    "micro_batch": (None,),
    "max_grad_norm": (None,),
    "optimizer": ("SGD",),
    "factor": (math.inf,),
    "every": (1,),
    "stops": ((1,), (3,), (1, 3, 4, 6, 8)),
    "data": ("stateful",),
    "microbatch": (0,),
    "stop": (4,),
}
"""Arguments of checks that are quick on `cpu` and `ddp` alone."""


def is_quick(case: Case) -> bool:
    """Return True if none of the case's arguments is one of `ELSEWHERE`."""
    return not any(value in ELSEWHERE.get(key, ()) for key, value in case.arguments.items())
