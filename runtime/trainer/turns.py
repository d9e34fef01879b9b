"""Several models in one training, whose updates take turns: each trains some, by its own loss."""

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
    """Models by name, as one module: placed, saved and averaged together.

    `module(function, *arguments)` is `function(models, *arguments)` within one forward, where
    `models["name"]` may be called as often as is liked, whatever a driver has wrapped around all.
    One of which nothing is trained, such as a teacher, stays in evaluation mode.
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
        """The names."""
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
        """As that of any module, but for the models of which nothing is trained. In evaluation
        none is held."""
        super().train(mode)
        if not mode and self._learning is not None:
            self.hold_all_but(self)
        for name in self._fixed:
            self[name].eval()
        return self

    def hold_all_but(self, names: Iterable[str]) -> None:
        """From here on only the models of these names learn; the others are constants, through
        which gradients flow."""
        if self._learning is None:
            self._learning = frozenset(n for n, p in self.named_parameters() if p.requires_grad)
        chosen = {id(p) for name in names for p in self[name].parameters()}
        for name, parameter in self.named_parameters():
            if name in self._learning and parameter.requires_grad != (id(parameter) in chosen):
                parameter.requires_grad = not parameter.requires_grad


class Turns:
    """A `Recipe.loss` for `Models`: each update trains some of them, by the loss that is theirs.

    ::

        losses = {"critic": critic_loss, "generator": generator_loss}
        Recipe(..., loss=Turns(losses, order=["critic"] * 5 + ["generator"]))

    Update 1 takes the first of `order` (by default each once, as they stand), and so on, from the
    beginning again; where a run is resumed the update's number tells whose turn it is. A loss is
    `loss(models, batch)`, the SUM over the items of the batch, a scalar; several models learn by
    one where the key is a tuple of names. Whoever's turn it is not is left bit for bit as it is,
    its state in the optimizer included, and is a constant in the loss.

    In an evaluation all losses are added up; as `Recipe.measure`, `measure` tells each by name.
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
        """The loss of the update of that number, from 1."""
        turn = self._turn(number)
        loss = self.losses[turn]

        def of_turn(module: nn.Module, batch: Batch) -> Any:
            self._models(module).hold_all_but(_names(turn))
            return module(loss, batch)

        return of_turn

    def name_of_update(self, number: int) -> str:
        """Whose turn the update of that number is, from 1: what a log calls its loss."""
        return "+".join(_names(self._turn(number)))

    def measure(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss of each, and `loss`, all together."""
        self._models(module)  # raises
        found = {"+".join(_names(turn)): module(loss, batch) for turn, loss in self.losses.items()}
        return {**found, "loss": torch.stack([*found.values()]).sum()}

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        """All losses together."""
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
