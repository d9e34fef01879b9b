"""Optimizers as settings name them: one for all parameters, or several, each for those that a
pattern names."""

from __future__ import annotations

import fnmatch
import importlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ..kernel.errors import SettingError
from ..kernel.ranges import check_range

__all__ = ["OptimizerGroup", "OptimizerSettings", "Several"]

_Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that are updated in another way than others. What it does not say is as in
    `optimizer`."""

    pattern: str | None = None
    """Of their names (`fnmatch`), such as `blocks.*.weight`; none: what no pattern takes."""
    dims: int | None = None
    """Only those of so many dimensions: 2 are matrices. With neither: what no other group takes."""
    name: str | None = None
    """The optimizer, by its dotted name."""
    lr: float | None = None
    weight_decay: float | None = None
    """For all of them, if it is said here."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments; with a name of its own none of `optimizer.args` are given."""

    def takes(self, name: str, parameter: nn.Parameter) -> bool:
        """True if pattern and dimensions are those of this parameter."""
        named = self.pattern is None or fnmatch.fnmatchcase(name, self.pattern)
        return named and self.dims in (None, parameter.dim())

    @property
    def comes(self) -> int:
        """Groups with a pattern come first, then those of dimensions alone, then the rest."""
        return 0 if self.pattern is not None else 1 if self.dims is not None else 2

    def __str__(self) -> str:
        pattern = "the rest" if self.pattern is None else repr(self.pattern)
        return pattern if self.dims is None else f"{pattern} of {self.dims} dimensions"


@dataclass(frozen=True)
class OptimizerSettings:
    """Any `torch.optim.Optimizer` by dotted name, or several."""

    name: str = "torch.optim.AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.0
    """For tensors of two or more dimensions; biases, norms and other vectors get none."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer's constructor."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Each parameter that is trained is taken by one of them: `pattern` (of names), `dims`, and
    what is different there (`name`, `lr`, `weight_decay`, `args`). One with neither pattern nor
    dims takes the rest."""

    def factory(self) -> Any:
        """The object that `name` names. Raises `SettingError`."""
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
        """Raises `SettingError` for an optimizer that cannot be imported, or a rate below 0."""
        for each in (self, *(self._of(group) for group in self.groups)):
            each.factory()
        for number, group in enumerate(self.groups):
            for key in ("lr", "weight_decay", "dims"):
                check_range(f"optimizer.groups.{number}.{key}", getattr(group, key), 0)

    def build(
        self, named: Iterable[tuple[str, nn.Parameter]], all_of_them: bool = True
    ) -> torch.optim.Optimizer:
        """The optimizer over two groups, with and without decay; over one where none decays; with
        `groups`, over those of each, `Several` where they are of several kinds. `all_of_them`: a
        pattern that takes none of the parameters is a mistake. Raises `SettingError`."""
        trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not self.groups:
            return self._made(trainable, every=False)
        dealt = _dealt(self.groups, trainable, all_of_them)
        made = []
        for group, members in dealt:
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

    def _made(self, trainable: _Named, every: bool) -> torch.optim.Optimizer:
        """`every`: decay vectors, too."""
        factory = self.factory()
        parameters = [parameter for _, parameter in trainable]
        decaying = [p for p in parameters if (every or p.dim() >= 2) and self.weight_decay]
        rest = [p for p in parameters if not ((every or p.dim() >= 2) and self.weight_decay)]
        groups = [
            {"params": chosen, "weight_decay": decay}
            for chosen, decay in ((decaying, self.weight_decay), (rest, 0.0))
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


def _dealt(
    groups: Sequence[OptimizerGroup], trainable: _Named, all_of_them: bool
) -> list[tuple[OptimizerGroup, _Named]]:
    """Each group that takes some with its parameters. Raises `SettingError`, naming patterns and
    parameters, unless each parameter is taken by one, and each pattern takes one."""
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
    """One optimizer, of more groups, of those of one kind, where all that tells them apart is in
    their groups, as it is in torch's own; `Several` of what is left."""
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
    return next(iter(kinds.values())) if len(kinds) == 1 else Several(kinds)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """True if torch has fused optimizers for the device of the parameters."""
    devices = _get_fused_kernels_supported_devices()
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


class Several(torch.optim.Optimizer):
    """Optimizers of several kinds as one. Each group says in `optimizer` whose it is; the groups
    and the state are this one's, and lent to each for its step."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        """By name. Whoever treats optimizers by their kind looks at each."""
        self.step_by = {name: optimizer.step for name, optimizer in self.optimizers.items()}
        """A driver may replace the steps of some."""
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
        """One step of each, on the groups that it has here."""
        held_back = {key: getattr(self, key) for key in _AMP if hasattr(self, key)}
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups = [g for g in self.param_groups if g["optimizer"] == name]
            optimizer.state = self.state
            vars(optimizer).update(held_back)
            self.step_by[name]()
            for key in held_back:
                delattr(optimizer, key)


_AMP = ("grad_scale", "found_inf")
"""What a fused optimizer is told beside gradients (see `torch.amp.GradScaler`)."""
