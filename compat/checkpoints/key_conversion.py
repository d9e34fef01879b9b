"""Names and layouts of weights in files that differ from the model's own.

transformers writes some models in the layout of their first release, such as one tensor per expert,
and converts them on loading. Its own conversions are applied here, so that the file's weights get
the names and shapes of an existing model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..theirs import theirs

__all__ = ["converted_weights", "ignored_keys"]


def converted_weights(
    model: nn.Module, weights: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """Return a file's weights by the model's names. `names`: the model's names. A weight without
    such a name keeps its own.
    """
    found = dict(weights)
    for conversions in _conversions(model):
        converted = _convert(model, weights, set(names), conversions)
        if converted.keys() <= set(names):
            return converted
        found = converted if found.keys() == weights.keys() else found
    return found


def _conversions(model: Any) -> Iterable[list[Any]]:
    """Return copies of the conversions to try: those by which the model was loaded, then all of its
    model type."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    if getattr(model, "hf_quantizer", None) is not None:  # its layers load themselves
        return
    if used := getattr(model, "_weight_conversions", None):
        yield copy.deepcopy(used)
    yield copy.deepcopy(theirs("conversion_mapping", "get_model_conversion_mapping")(model))


def _convert(
    model: Any, weights: Mapping[str, Tensor], names: set[str], conversions: list[Any]
) -> dict[str, Tensor]:
    """Collect the tensors of each conversion, as `from_pretrained` does, and apply it."""
    rename = theirs("core_model_loading", "rename_source_key")
    natural = theirs("core_model_loading", "dot_natural_key")  # experts in numerical order
    renaming = theirs("core_model_loading", "WeightRenaming")
    merging = theirs("core_model_loading", "WeightConverter")
    renamings = [each for each in conversions if isinstance(each, renaming)]
    mergers = [each for each in conversions if isinstance(each, merging)]
    by_pattern = {pattern: each for each in mergers for pattern in each.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(names, True)
    found: dict[str, Tensor] = {}
    collected: dict[str, Any] = {}
    for name in sorted(weights, key=natural):
        new, pattern = rename(name, renamings, mergers, prefix, known)
        if new not in known and name in known:
            new, pattern = name, None
        if pattern is None or new not in known:
            found[new if new in known else name] = weights[name]
            continue
        each = collected.setdefault(new, copy.deepcopy(by_pattern[pattern]))
        each.add_tensor(new, name, pattern, weights[name])
    for first, each in collected.items():
        for name, made in each.convert(first, model=model, config=model.config).items():
            found[name] = made[0] if isinstance(made, list) else made
    return found


def ignored_keys(model: Any, kind: str) -> list[str]:
    """Return the model class's patterns of keys that may be `missing` from a file, or `unexpected`
    in it, such as buffers that earlier releases saved.
    """
    own = list(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    earlier = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"] if kind == "unexpected" else []
    return [*own, *earlier]
