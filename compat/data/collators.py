"""The default collator: how a list of samples becomes a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

__all__ = ["DataCollator", "collator_for", "default_data_collator"]

DataCollator = Callable[[list[Any]], dict[str, Any]]

_LABELS = ("label", "label_ids")


def collator_for(processing_class: Any) -> DataCollator:
    """Return the collator for a Trainer without one: the padding collator for a tokenizer or a
    sequence feature extractor of transformers, else the default one.
    """
    if "transformers" in sys.modules:  # else `processing_class` cannot be a class of transformers
        import transformers

        padded = transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor
        if isinstance(processing_class, padded):
            padding: Any = transformers.DataCollatorWithPadding
            return cast("DataCollator", padding(processing_class))
    return default_data_collator


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack each field of the samples, which are dicts or objects with attributes.

    `label` or `label_ids` becomes `labels`, integers as int64 and others as float32. Fields that
    are strings or None in the first sample are left out. `return_tensors`: "pt" or "np". Raises
    ValueError, naming the field, if samples cannot be stacked.
    """
    if return_tensors not in ("pt", "np"):
        raise ValueError(f"return_tensors={return_tensors!r}: there is 'pt' and 'np'")
    samples = [item if isinstance(item, Mapping) else vars(item) for item in features]
    first = samples[0]
    label = next((name for name in _LABELS if first.get(name) is not None), None)
    batch = {}
    if label is not None:
        labels = _stacked(label, [sample[label] for sample in samples])
        stays = label == "label_ids" and isinstance(first[label], torch.Tensor)
        batch["labels"] = labels if stays else _as_labels(labels)
    for name, value in first.items():
        if name not in _LABELS and value is not None and not isinstance(value, str):
            batch[name] = _stacked(name, [sample[name] for sample in samples])
    if return_tensors == "np":
        return {name: tensor.numpy() for name, tensor in batch.items()}
    return batch


def _stacked(name: str, values: list[Any]) -> torch.Tensor:
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values)
        if isinstance(values[0], np.ndarray | np.generic):
            return torch.from_numpy(np.stack(values))
        return torch.tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the samples' {name!r} cannot be stacked: {error}. Pad them, or pass a data_collator"
        ) from error


def _as_labels(labels: torch.Tensor) -> torch.Tensor:
    return labels.to(torch.float32 if labels.is_floating_point() else torch.int64)
