"""The argument `accelerator_config`: how batches are split over processes."""

from __future__ import annotations

import copy
import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import distributed

from ..errors import ArgumentError

__all__ = ["AcceleratorConfig", "require_state", "resolve_accumulation"]


@dataclass
class AcceleratorConfig:
    """Given as `TrainingArguments(accelerator_config=...)`: this, a dict, or a JSON file's path."""

    split_batches: bool = False
    """Batch sizes in the arguments are those of all processes together, not of each."""
    dispatch_batches: bool | None = None
    """Process 0 alone reads the data and sends the others their part; by default (None) for
    iterable data sets only."""
    even_batches: bool = True
    """Repeat samples from the start until every process has a batch of the same size."""
    use_seedable_sampler: bool = True
    """The order of samples depends on the seed and the epoch alone, not on what else is drawn."""
    non_blocking: bool = False
    """Copy batches to the device while the host goes on; needs pinned memory."""
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    """`num_steps`: as `gradient_accumulation_steps`; `sync_each_batch`: average gradients after
    each batch, not once an update; accelerate's others change nothing, as with transformers."""
    use_configured_state: bool = False
    """Of a process group, or of accelerate's state, that was made before, or of earlier arguments.
    It is joined in any case; if True, there must be one."""

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> AcceleratorConfig:
        """The configuration in a JSON file. Raises `ArgumentError` for keys that do not exist."""
        return cls.from_mapping(json.loads(Path(json_file).read_text(encoding="utf-8")), json_file)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], source: object) -> AcceleratorConfig:
        """The configuration in a dict; `source` says in an error where the dict came from."""
        known = [item.name for item in fields(cls)]
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ArgumentError(f"{source} has the unknown key {key!r}; {hint}")
        return cls(**given)

    @classmethod
    def of(cls, given: Any) -> AcceleratorConfig:
        """Whatever the argument may be: None, an instance, a dict or the path of a JSON file.

        Raises `NotImplementedError` for a class instead of an instance.
        """
        if given is None:
            return cls()
        if isinstance(given, type):
            raise NotImplementedError(
                "Tried passing in a callable to `accelerator_config`, the class "
                f"{given.__name__}; give an instance of it, a dict, or the path of a JSON file"
            )
        if isinstance(given, Mapping):
            return cls.from_mapping(given, "accelerator_config")
        if isinstance(given, str | Path):
            return cls.from_json_file(given)
        return given if isinstance(given, cls) else cls.from_mapping(vars(given), type(given))

    def to_dict(self) -> dict[str, Any]:
        """All fields, copied."""
        return copy.deepcopy(vars(self))

    def pop(self, key: str, default: Any = None) -> Any:
        """Take a field away and give its value."""
        return vars(self).pop(key, default)


_earlier: list[bool] = []
"""Not empty: arguments have been made in this process."""


def require_state(config: AcceleratorConfig) -> None:
    """Of the arguments that are being made. Raises `ArgumentError` where they are to use a state
    that was configured, and there is none."""
    accelerate = sys.modules.get("accelerate.state")
    found = _earlier or distributed.is_initialized()
    if not found and accelerate is not None:
        found = bool(accelerate.PartialState._shared_state)
    if config.use_configured_state and not found:
        raise ArgumentError(
            "accelerator_config.use_configured_state=True, and there is no state yet: make the "
            "process group, accelerate's PartialState or other TrainingArguments first, or leave "
            "it False, which joins what is there"
        )
    _earlier[:] = [True]


_ACCUMULATION = {"num_steps", "sync_each_batch", "adjust_scheduler", "sync_with_dataloader"}
"""accelerate's. The last two are about an accumulation of its own, which no Trainer uses."""


def resolve_accumulation(args: Any) -> None:
    """`gradient_accumulation_kwargs["num_steps"]` is another way to say how much to accumulate.

    Raises `ArgumentError` when both are given and differ.
    """
    config = AcceleratorConfig.of(args.accelerator_config)
    given = config.gradient_accumulation_kwargs or {}
    if unknown := sorted(given.keys() - _ACCUMULATION):
        raise ArgumentError(
            f"gradient_accumulation_kwargs has {', '.join(unknown)}; allowed: "
            f"{', '.join(sorted(_ACCUMULATION))}"
        )
    steps = given.get("num_steps")
    if steps is None or steps == args.gradient_accumulation_steps:
        return
    if args.gradient_accumulation_steps > 1:
        raise ArgumentError(
            "The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps is "
            f"{args.gradient_accumulation_steps}, and gradient_accumulation_kwargs['num_steps'] is "
            f"{steps}; give one"
        )
    args.gradient_accumulation_steps = steps
