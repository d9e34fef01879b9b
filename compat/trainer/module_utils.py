"""Training mode, asked for at each batch."""

from __future__ import annotations

from torch import nn

__all__ = ["TrainMode"]


class TrainMode:
    """`model.train()`, which walks through all modules and sets each: here they are looked at, and
    it is called where one is in another mode. A model with a `train` of its own has it called
    always. Modules that are added later are not looked at; new ones are in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = list(model.modules())
        self._plain = all(type(part).train is nn.Module.train for part in self._modules)

    def enter(self) -> None:
        """Put every module into training mode."""
        if not self._plain or not all(part.training for part in self._modules):
            self.model.train()
