"""Parameters that are frozen when an engine is built, and may be thawed during a run."""

from __future__ import annotations

from torch import nn

from ...kernel.errors import RecipeError

__all__ = ["Frozen"]


class Frozen:
    """The parameters of a module that require no gradient now, by FQN."""

    def __init__(self, module: nn.Module) -> None:
        self._named = {n: p for n, p in module.named_parameters() if not p.requires_grad}

    def thawed(self) -> dict[str, nn.Parameter]:
        """Return the frozen parameters that require a gradient by now."""
        return {name: p for name, p in self._named.items() if p.requires_grad}

    def refuse_thawed(self, driver: str) -> None:
        """Raise `RecipeError`, naming them, if there are any."""
        if thawed := self.thawed():
            raise RecipeError(
                f"requires_grad was set for {', '.join([*thawed][:10])} during the run, and "
                f"{driver} partitioned what it trains when the run began: they would not learn. "
                "Let them require a gradient from the start with a learning rate of 0 in a group "
                "of their own, or end this run and resume it with them trained, or take the "
                "backend ddp or fsdp"
            )
