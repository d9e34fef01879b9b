"""Removes the columns that a model's `forward` does not take, and logs them once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["RemoveColumnsCollator", "is_arrow_dataset", "without_unused_columns"]


class RemoveColumnsCollator:
    """A collator that drops a sample's unused keys before it calls the one inside.

    Samples that are not dicts are passed unchanged. `logger` logs once the names of dropped keys;
    None logs nothing.
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        signature_columns: list[str],
        logger: logging.Logger | None = None,
        model_name: str | None = None,
        description: str | None = None,
    ) -> None:
        self.data_collator = data_collator
        self.signature_columns = signature_columns
        self.logger = logger
        self.model_name = model_name
        self.description = description
        self.message_logged = False

    def __call__(self, features: list[Any]) -> Any:
        taken = set(self.signature_columns)
        return self.data_collator(
            [
                # the usual case, for each sample: a copy, since the collator may change it
                feature.copy()
                if type(feature) is dict and feature.keys() <= taken
                else self._remove_columns(feature)
                for feature in features
            ]
        )

    def _remove_columns(self, feature: Any) -> Any:
        if not isinstance(feature, dict):
            return feature
        unused = feature.keys() - set(self.signature_columns)
        if unused and self.logger and self.model_name and not self.message_logged:
            log_unused(self.logger, unused, self.model_name, self.description)
            self.message_logged = True
        return {name: value for name, value in feature.items() if name not in unused}


def without_unused_columns(
    dataset: Any,
    signature_columns: list[str],
    model_name: str,
    description: str | None,
    logger: logging.Logger,
) -> Any:
    """Return a view of a `datasets.Dataset` with only the columns that the model takes.

    Raises ValueError when no column would be left.
    """
    unused = [name for name in dataset.column_names if name not in signature_columns]
    if unused:
        log_unused(logger, unused, model_name, description)
    if len(unused) == len(dataset.column_names):
        raise ValueError(
            f"{model_name}.forward takes none of the columns of the {description or 'given'} data"
            f" set. It takes {', '.join(signature_columns)}; the data set has"
            f" {', '.join(unused) or 'none'}. Rename the columns, or set"
            " remove_unused_columns=False if the collator makes the model's inputs of them."
        )
    return dataset.remove_columns(unused)


def log_unused(
    logger: logging.Logger, unused: Iterable[str], model_name: str, description: str | None
) -> None:
    """Log at level info which columns are dropped."""
    message = (
        f"columns of the {description or 'given'} data set that {model_name}.forward does not take "
        f"are left out: {', '.join(sorted(unused))}"
    )
    logger.info(message)  # log a plain string: users pass their own loggers


def is_arrow_dataset(dataset: Any) -> bool:
    """True for a `datasets.Dataset`; the library is not imported for this check."""
    import sys

    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.Dataset)
