"""Optimizers by settings: one for all parameters, or several, each for the parameters that a
pattern matches."""

from __future__ import annotations

import fnmatch
import importlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import nn

from ..data.private_names import private_name
from ..data.ranges import Range
from ..kernel.errors import SettingError
from .layer_decay import depths

__all__ = ["CombinedOptimizer", "OptimizerGroup", "OptimizerSettings"]

_Named = list[tuple[str, nn.Parameter]]

_BY_SHORT_NAME = {
    name.lower(): f"torch.optim.{name}"
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
"""torch's own optimizers, by their names in small letters."""


def _full_name(name: str) -> str:
    """Return the dotted name of an optimizer of torch that is given as `adamw` or `AdamW`; any
    other name unchanged."""
    return _BY_SHORT_NAME.get(name.lower(), name)


Rate = Annotated[float, Range(0)]


@dataclass(frozen=True)
class OptimizerGroup:
    """A group of parameters with options of its own. Options that it leaves out are those of
    `optimizer`."""

    pattern: str | None = None
    """Pattern of parameter names (`fnmatch`), such as `blocks.*.weight`. None: all that no pattern
    matches.
    """
    dims: Annotated[int, Range(0, unit="dimensions")] | None = None
    """Only parameters with this number of dimensions: 2 selects matrices. Without pattern and dims,
    a group takes the parameters that no other group takes."""
    name: str | None = None
    """The optimizer, by its dotted name."""
    lr: Rate | None = None
    """Its learning rate, which `schedule` multiplies."""
    weight_decay: Rate | None = None
    """The weight decay of all its parameters, if set here."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments. A group with a `name` gets none of `optimizer.args`."""

    def __post_init__(self) -> None:
        if self.name is not None:
            object.__setattr__(self, "name", _full_name(self.name))

    def takes(self, name: str, parameter: nn.Parameter) -> bool:
        """True if pattern and dimensions match this parameter."""
        named = self.pattern is None or fnmatch.fnmatchcase(name, self.pattern)
        return named and self.dims in (None, parameter.dim())

    @property
    def comes(self) -> int:
        """Sort key of the group: groups with a pattern come first, then groups with dims alone,
        then the rest."""
        return 0 if self.pattern is not None else 1 if self.dims is not None else 2

    def __str__(self) -> str:
        pattern = "the rest" if self.pattern is None else repr(self.pattern)
        return pattern if self.dims is None else f"{pattern} of {self.dims} dimensions"


@dataclass(frozen=True)
class OptimizerSettings:
    """Any `torch.optim.Optimizer` by dotted name, one of torch's by its name alone (`sgd`), or
    several."""

    name: str = "torch.optim.AdamW"
    """Dotted name of the class, or one of torch's in small letters."""
    lr: Rate = 1e-3
    """Learning rate, which `schedule` multiplies."""
    weight_decay: Rate = 0.0
    """For tensors of two or more dimensions; biases, norms and other vectors get none."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer's constructor."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Groups of parameters; each trained parameter is in exactly one. A group selects parameters by
    `pattern` (of names) and `dims`, and sets what differs (`name`, `lr`, `weight_decay`, `args`). A
    group with neither pattern nor dims takes the rest."""
    layer_decay: Annotated[float, Range(0, most=1)] = 1.0
    """Layer-wise decay of the learning rate: each block has this share, such as 0.9, of the rate of
    the next block. Embeddings have the lowest rate, a head the full rate
    (https://arxiv.org/abs/2106.08254). 1: the same rate everywhere."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _full_name(self.name))

    def factory(self) -> Any:
        """Import the object called `name`. Raises `SettingError`."""
        module, _, attribute = self.name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(
                f"optimizer.name is {self.name!r}, which cannot be imported ({error}) with torch "
                f"{torch.__version__}; give the full dotted name of a torch optimizer, such as "
                "torch.optim.SGD"
            ) from error

    def check(self) -> None:
        """Raises `SettingError` for an optimizer that cannot be imported, or if rates by layer are
        set in two ways."""
        if self.groups and self.layer_decay != 1:
            raise SettingError(
                f"optimizer.layer_decay is {self.layer_decay}, and optimizer.groups are set; take "
                "one: groups may have an lr of their own"
            )
        for each in (self, *(self._of(group) for group in self.groups)):
            each.factory()

    def build(
        self, named: Iterable[tuple[str, nn.Parameter]], all_of_them: bool = True
    ) -> torch.optim.Optimizer:
        """Build the optimizer over two groups, with and without decay, or over one group if no
        parameter decays. With `groups`, build it over the parameters of each group, as a
        `CombinedOptimizer` if the kinds of optimizers differ. `all_of_them`: `named` holds all
        parameters of the model, so a pattern that matches none of them is an error. Raises
        `SettingError`."""
        trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not self.groups:
            return self._made(trainable, every=False)
        assigned = _assigned(self.groups, trainable, all_of_them)
        made = []
        for group, members in assigned:
            own = self._of(group)
            made.append((own.name, own._made(members, every=group.weight_decay is not None)))
        return _as_one(made)

    def _of(self, group: OptimizerGroup) -> OptimizerSettings:
        said = {
            key: value
            for key in ("name", "lr", "weight_decay")
            if (value := getattr(group, key)) is not None
        }
        args = {**({} if group.name else self.args), **group.args}
        return replace(self, **said, args=args, groups=())

    def _decays(self, parameter: nn.Parameter, every: bool) -> bool:
        return bool(self.weight_decay) and (every or parameter.dim() >= 2)

    def _layers(self, trainable: _Named) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
        """Return the options of each layer's groups, and the layer's parameters. The last layer
        comes first and has the full rate.
        """
        if self.layer_decay == 1:
            return [({}, [parameter for _, parameter in trainable])]
        depth_of = depths([name for name, _ in trainable])
        layers: dict[int, list[nn.Parameter]] = {}
        for depth, (_, parameter) in zip(depth_of, trainable, strict=True):
            layers.setdefault(depth, []).append(parameter)
        top = max(layers)
        return [
            ({"lr": self.lr * self.layer_decay ** (top - depth)}, layers[depth])
            for depth in sorted(layers, reverse=True)
        ]

    def _made(self, trainable: _Named, every: bool) -> torch.optim.Optimizer:
        """Build one optimizer. `every`: decay vectors, too."""
        factory = self.factory()
        parameters = [parameter for _, parameter in trainable]
        groups = [
            {**given, "params": chosen, "weight_decay": decay}
            for given, layer in self._layers(trainable)
            for chosen, decay in (
                ([p for p in layer if self._decays(p, every)], self.weight_decay),
                ([p for p in layer if not self._decays(p, every)], 0.0),
            )
            if chosen
        ]
        args = dict(self.args)
        if self.name in ("torch.optim.AdamW", "torch.optim.Adam") and _can_fuse(parameters):
            # one kernel for all parameters, and it honours `found_inf`
            args.setdefault("fused", True)
        try:
            return typing.cast(torch.optim.Optimizer, factory(groups, lr=self.lr, **args))
        except (TypeError, ValueError) as error:
            given = {"lr": self.lr, "weight_decay": self.weight_decay, **args}
            raise SettingError(
                f"optimizer {self.name!r} refuses {given} for {_listed(trainable)}: {error}"
            ) from error


def _assigned(
    groups: Sequence[OptimizerGroup], trainable: _Named, all_of_them: bool
) -> list[tuple[OptimizerGroup, _Named]]:
    """Return each group that takes parameters, with its parameters. Raises `SettingError`, with
    patterns and parameters, unless exactly one group takes each parameter and each pattern matches
    at least one."""
    members: dict[int, _Named] = {number: [] for number in range(len(groups))}
    left: _Named = []
    for name, parameter in trainable:
        taking = [number for number, group in enumerate(groups) if group.takes(name, parameter)]
        first = min((groups[number].comes for number in taking), default=0)
        takers = [number for number in taking if groups[number].comes == first]
        if len(takers) > 1:
            shown = " and ".join(f"{number} ({groups[number]})" for number in takers)
            raise SettingError(
                f"optimizer.groups {shown} both take {name}; each parameter must be taken by one: "
                "make the patterns narrower"
            )
        if takers:
            members[takers[0]].append((name, parameter))
        else:
            left.append((name, parameter))
    if left:
        raise SettingError(
            f"no group of optimizer.groups takes {_listed(left)}; add a group without pattern and "
            "dims, which takes the rest, or a pattern for them; or freeze them"
        )
    for number, group in enumerate(groups):
        if all_of_them and group.pattern is not None and not members[number]:
            raise SettingError(
                f"optimizer.groups {number} ({group}) takes no parameter; those that are trained "
                f"are {_listed(trainable)}"
            )
    return [(group, members[number]) for number, group in enumerate(groups) if members[number]]


def _listed(named: _Named) -> str:
    shown = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in named[:10])
    return shown + (f" and {len(named) - 10} more" if len(named) > 10 else "")


def _as_one(made: Sequence[tuple[str, torch.optim.Optimizer]]) -> torch.optim.Optimizer:
    """Merge optimizers of one kind into one with more groups, if they differ only in their groups,
    as torch's own do. Combine the rest in `CombinedOptimizer`."""
    kinds: dict[str, torch.optim.Optimizer] = {}
    for name, optimizer in made:
        while name in kinds and not _is_torchs(optimizer):
            name += "'"
        if name not in kinds:
            kinds[name] = optimizer
            continue
        for group in optimizer.param_groups:
            kinds[name].add_param_group(group)
        kinds[name].state.update(optimizer.state)
    return next(iter(kinds.values())) if len(kinds) == 1 else CombinedOptimizer(kinds)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """True if torch says that it has fused optimizers for the device of the parameters."""
    module, name = "torch.utils._foreach_utils", "_get_fused_kernels_supported_devices"
    devices = private_name(module, name, tuple)()
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers of several kinds as one. The entry `optimizer` of a group names the optimizer that
    updates it. This object owns the groups and the state, and lends them to each optimizer for its
    step."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        """The optimizers by name. Code that treats optimizers by their kind must look at each of
        them."""
        self.step_by = {name: optimizer.step for name, optimizer in self.optimizers.items()}
        """The step function of each optimizer; a driver may replace some of them."""
        groups = []
        for name, optimizer in self.optimizers.items():
            groups += [{**group, "optimizer": name} for group in optimizer.param_groups]
        super().__init__(groups, {})
        for optimizer in self.optimizers.values():
            self.state.update(optimizer.state)
        self._step_supports_amp_scaling = all(
            getattr(each, "_step_supports_amp_scaling", False) for each in self.optimizers.values()
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step of each optimizer, on its groups."""
        held_back = {key: getattr(self, key) for key in _AMP if hasattr(self, key)}
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups = [g for g in self.param_groups if g["optimizer"] == name]
            optimizer.state = self.state
            vars(optimizer).update(held_back)
            self.step_by[name]()
            for key in held_back:
                delattr(optimizer, key)


_AMP = ("grad_scale", "found_inf")
"""Attributes that a fused optimizer reads beside gradients (see `torch.amp.GradScaler`)."""
