"""Several models in one run whose updates take turns: each update trains some of the models, by its
own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernel.errors import RecipeError
from ..kernel.recipe import Batch

__all__ = ["Models", "Turns"]

Names = str | tuple[str, ...]
Loss = Callable[["Models", Batch], Tensor]


class Models(nn.Module):
    """Models by name, as one module: moved to devices, saved and averaged together.

    `module(function, *arguments)` is `function(models, *arguments)` within one forward, in which
    `models["name"]` may be called any number of times, whatever wrapper a driver uses. A model
    without trainable parameters, such as a teacher, stays in evaluation mode.
    """  # no ModuleDict, which torch 2.8 does not shard

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)
        self._fixed = {name for name in self if _is_frozen(self[name])}
        self._learning: frozenset[str] | None = None
        self.train()

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._modules)

    def forward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not callable(function):
            raise RecipeError(
                f"several models ({', '.join(self)}) were called with a {type(function).__name__}; "
                "call them with a function of the models, as in module(function, batch), also in "
                "predict(module, batch) of a recipe's file"
            )
        return function(self, *arguments, **named)

    def train(self, mode: bool = True) -> Models:
        """Set the mode. Models without trainable parameters stay in evaluation mode. In evaluation
        mode no model is held constant.
        """
        super().train(mode)
        if not mode and self._learning is not None:
            self.hold_all_but(self)
        for name in self._fixed:
            self[name].eval()
        return self

    def hold_all_but(self, names: Iterable[str]) -> None:
        """Train only the models of these names from now on; the others are constants, through which
        gradients flow."""
        if self._learning is None:
            self._learning = frozenset(n for n, p in self.named_parameters() if p.requires_grad)
        chosen = {id(p) for name in names for p in self[name].parameters()}
        for name, parameter in self.named_parameters():
            if name in self._learning and parameter.requires_grad != (id(parameter) in chosen):
                parameter.requires_grad = not parameter.requires_grad


class Turns:
    """A `Recipe.loss` for `Models`: each update trains some of them, by their own loss.

    ::

        losses = {"critic": critic_loss, "generator": generator_loss}
        Recipe(..., loss=Turns(losses, order=["critic"] * 5 + ["generator"]))

    Update 1 takes the first of `order` (by default each loss once, in order), and so on,
    cyclically; in a resumed run the number of the update selects the turn. A loss is `loss(models,
    batch)`, the SUM over the items of the batch, a scalar; a tuple of names as the key trains
    several models by one loss. Models that do not take the turn are left bitwise unchanged, with
    their optimizer state, and are constants in the loss.

    In an evaluation all losses are added up; `measure`, used as `Recipe.measure`, reports each by
    name.
    """

    def __init__(
        self,
        losses: Mapping[str, Loss] | Mapping[Names, Loss],
        order: Sequence[Names] | None = None,
    ) -> None:
        self.losses = dict(cast(Mapping[Names, Loss], losses))
        self.order = list(self.losses if order is None else order)
        if not self.losses or set(self.order) != set(self.losses):
            raise RecipeError(
                f"the turns are {self.order} and there are losses of {list(self.losses)}; each "
                "turn needs a loss, and each loss a turn"
            )

    def of_update(self, number: int) -> Callable[[nn.Module, Batch], Tensor]:
        """Return the loss of an update by its number, from 1."""
        turn = self._turn(number)
        loss = self.losses[turn]

        def of_turn(module: nn.Module, batch: Batch) -> Any:
            self._models(module).hold_all_but(_names(turn))
            return module(loss, batch)

        return of_turn

    def name_of_update(self, number: int) -> str:
        """Return the name of the turn of the update `number`, counted from 1. A log uses it for the
        loss.
        """
        return "+".join(_names(self._turn(number)))

    def measure(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of each turn, and their sum as `loss`."""
        self._models(module)  # raises
        found = {"+".join(_names(turn)): module(loss, batch) for turn, loss in self.losses.items()}
        return {**found, "loss": torch.stack([*found.values()]).sum()}

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of all losses."""
        return self.measure(module, batch)["loss"]

    def _turn(self, number: int) -> Names:
        return self.order[(number - 1) % len(self.order)]

    def _models(self, module: nn.Module) -> Models:
        found = next((part for part in module.modules() if isinstance(part, Models)), None)
        if found is None:
            raise RecipeError(
                "recipe.loss takes turns between models, and recipe.model made "
                f"{type(module).__name__}; it must make drivetrain.Models({{name: model}})"
            )
        if missing := {name for turn in self.losses for name in _names(turn)} - set(found):
            raise RecipeError(
                f"recipe.loss has turns of {', '.join(sorted(missing))}; the models are "
                f"{', '.join(found)}"
            )
        return found


def _names(turn: Names) -> tuple[str, ...]:
    return (turn,) if isinstance(turn, str) else turn


def _is_frozen(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)
