"""Collators: how a list of samples becomes a batch.

Where transformers is installed its collators are given out under their names; without it there
are the default one and one that pads.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

__all__ = ["DataCollator", "PaddingCollator", "collator_for", "default_data_collator"]

DataCollator = Callable[[list[Any]], dict[str, Any]]

_OURS = {"DataCollatorWithPadding": "PaddingCollator", "DefaultDataCollator": "PlainCollator"}
"""Stands in for a collator of transformers where it is not installed."""

_LABELS = ("label", "label_ids")


def __getattr__(name: str) -> Any:
    """A collator of transformers, or what stands in for it."""
    if "Collator" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        return getattr(transformers, name)
    if name in _OURS:
        return globals()[_OURS[name]]
    raise ImportError(f"{name} is transformers' own: pip install transformers")


def collator_for(processing_class: Any) -> DataCollator:
    """The collator of a Trainer that was given none: padding for a tokenizer or a sequence
    feature extractor of transformers, else the default one.
    """
    if "transformers" in sys.modules:  # else `processing_class` cannot be one of theirs
        import transformers

        padded = transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor
        if isinstance(processing_class, padded):
            padding: Any = transformers.DataCollatorWithPadding
            return cast("DataCollator", padding(processing_class))
    return default_data_collator


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack each field of the samples, which are dicts or objects with attributes.

    `label` or `label_ids` becomes `labels`, integers as int64 and others as float32. Strings and
    None are left out, as the first sample shows them. `return_tensors`: "pt" or "np". Raises
    ValueError, naming the field, where samples cannot be stacked.
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


class PlainCollator:
    """`default_data_collator` as an object."""

    def __init__(self, return_tensors: str = "pt") -> None:
        self.return_tensors = return_tensors

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """See `default_data_collator`."""
        return default_data_collator(features, return_tensors or self.return_tensors)


@dataclass
class PaddingCollator:
    """Pads every field that holds sequences to the longest of the batch, then stacks.

    `tokenizer`: any object; its `pad_token_id` (else 0) fills `input_ids`, its `padding_side`
    (else right) says where. Labels are filled with -100, everything else with 0. Missing
    `attention_mask`s are made. Lengths are rounded up to `pad_to_multiple_of`.
    """

    tokenizer: Any = None
    pad_to_multiple_of: int | None = None

    def __call__(self, features: list[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of tensors; the sequences have the shape (samples, longest)."""
        samples = [dict(feature) for feature in features]
        for sample in samples:
            if "input_ids" in sample:
                sample.setdefault("attention_mask", [1] * len(sample["input_ids"]))
        fillers = {"input_ids": getattr(self.tokenizer, "pad_token_id", None) or 0}
        fillers |= dict.fromkeys(("labels", *_LABELS), -100)
        for name, value in samples[0].items():
            if isinstance(value, Sequence) and not isinstance(value, str):
                self._pad([sample[name] for sample in samples], samples, name, fillers.get(name, 0))
        return default_data_collator(samples)

    def _pad(self, rows: list[Any], samples: list[dict[str, Any]], name: str, filler: int) -> None:
        multiple = self.pad_to_multiple_of or 1
        longest = -(-max(map(len, rows)) // multiple) * multiple
        left = getattr(self.tokenizer, "padding_side", "right") == "left"
        for row, sample in zip(rows, samples, strict=True):
            fill = [filler] * (longest - len(row))
            sample[name] = [*fill, *row] if left else [*row, *fill]
