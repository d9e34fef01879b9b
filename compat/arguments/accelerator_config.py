"""The argument `accelerator_config`: how batches are split over processes."""

from __future__ import annotations

import copy
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import distributed

from ...data.small_files import read_json
from ..errors import ArgumentError

__all__ = ["AcceleratorConfig", "require_state", "resolve_accumulation"]


@dataclass
class AcceleratorConfig:
    """The value of `TrainingArguments(accelerator_config=...)`: an instance, a dict, or the path of
    a JSON file."""

    split_batches: bool = False
    """Batch sizes in the arguments count all processes together, not each one."""
    dispatch_batches: bool | None = None
    """Only process 0 reads the data, and sends the other processes their parts; by default (None)
    for iterable data sets only."""
    even_batches: bool = True
    """Repeat samples from the start until every process has a batch of the same size."""
    use_seedable_sampler: bool = True
    """The order of samples depends on the seed and the epoch alone, not on what else is drawn."""
    non_blocking: bool = False
    """Copy batches to the device asynchronously; needs pinned memory."""
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    """`num_steps`: as `gradient_accumulation_steps`; `sync_each_batch`: average gradients after
    each batch, not once an update; accelerate's others change nothing, as with transformers."""
    use_configured_state: bool = False
    """Require an existing process group, accelerate state or arguments. An existing one is joined
    in any case.
    """

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> AcceleratorConfig:
        """Read the configuration from a JSON file. Raises `ArgumentError` for keys that do not
        exist."""
        return cls.from_mapping(read_json(json_file), json_file)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], source: object) -> AcceleratorConfig:
        """Read the configuration from a dict; `source` names the origin of the dict in errors."""
        known = [item.name for item in fields(cls)]
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ArgumentError(f"{source} has the unknown key {key!r}; {hint}")
        return cls(**given)

    @classmethod
    def of(cls, given: Any) -> AcceleratorConfig:
        """Convert the argument: None, an instance, a dict or the path of a JSON file.

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
        """Return a copy of all fields."""
        return copy.deepcopy(vars(self))

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove a field and return its value."""
        return vars(self).pop(key, default)


_earlier: list[bool] = []
"""Not empty once arguments have been made in this process."""


def require_state(config: AcceleratorConfig) -> None:
    """Check the state that new arguments shall use. Raises `ArgumentError` if they require an
    earlier state and there is none.
    """
    accelerate = sys.modules.get("accelerate.state")
    found = _earlier or distributed.is_initialized()
    if not found and accelerate is not None:
        found = bool(accelerate.PartialState._shared_state)
    if config.use_configured_state and not found:
        raise ArgumentError(
            "accelerator_config.use_configured_state=True, and there is no state yet: make the "
            "process group, accelerate's PartialState or other TrainingArguments first, or leave "
            "it False, which joins an existing state"
        )
    _earlier[:] = [True]


_ACCUMULATION = {"num_steps", "sync_each_batch", "adjust_scheduler", "sync_with_dataloader"}
"""The keys of accelerate. The last two concern accelerate's own accumulation, which no Trainer
uses."""


def resolve_accumulation(args: Any) -> None:
    """Set the accumulation from `gradient_accumulation_kwargs["num_steps"]`, if it is given.

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
