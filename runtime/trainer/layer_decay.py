"""Layer-wise decay of learning rates: each block learns slower than the one after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..kernel.errors import SettingError

__all__ = ["depths"]

_NUMBERED = re.compile(r"^((?:[^.]+\.)*?)(\d+)\.")


def depths(names: Sequence[str]) -> list[int]:
    """Return the depth of each parameter in its model, from 0. Blocks are the numbered children of
    the module whose numbered children hold the most parameters. Parameters registered before the
    first block (embeddings) are at depth 0; parameters after the last block (a head) are above it.
    Raises `SettingError` if no children are numbered."""
    found = [_NUMBERED.match(name) for name in names]
    holders = Counter(match[1] for match in found if match)
    if not holders:
        raise SettingError(
            "optimizer.layer_decay is set, and no parameter is in a numbered block, such as "
            f"'blocks.0.weight': the model has {', '.join(names[:5])}. Set rates by "
            "optimizer.groups instead"
        )
    holder = holders.most_common(1)[0][0]
    numbers = [int(match[2]) if match and match[1] == holder else None for match in found]
    num_blocks = 1 + max(number for number in numbers if number is not None)
    result, seen = [], False
    for number in numbers:
        seen = seen or number is not None
        outside = num_blocks + 1 if seen else 0
        result.append(outside if number is None else number + 1)
    return result
