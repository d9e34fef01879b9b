"""Reads the training arguments and `optim_args` for an optimizer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["OptimArgs", "Request", "library"]


class OptimArgs:
    """The values of `optim_args`, "name=value,name=value".

    Methods that read a malformed value raise ValueError with the value; `unread` lists names that
    were not read. A boolean is "true", "yes", "on", "1" or one of their opposites.
    """

    def __init__(self, text: str | None) -> None:
        self._values: dict[str, str] = {}
        for part in (text or "").replace(" ", "").split(","):
            name, sign, value = part.partition("=")
            if part and not (name and sign):
                raise ValueError(
                    f"optim_args should read 'name=value,name=value', but holds {part!r}"
                )
            if part:
                self._values[name] = value
        self.unread = set(self._values)

    def given(self, **kinds: type) -> dict[str, Any]:
        """Return the arguments of these names that are given, converted to these types."""
        return {name: self._read(name, kinds[name]) for name in kinds if name in self._values}

    def filled(self, **defaults: Any) -> dict[str, Any]:
        """Return the arguments of these names, of the types of these defaults, which fill in."""
        return defaults | self.given(**{name: type(value) for name, value in defaults.items()})

    def _read(self, name: str, kind: type) -> Any:
        self.unread.discard(name)
        text = self._values[name]
        try:
            return _FLAGS[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            words = {bool: "true or false", float: "a number", int: "a whole number"}[kind]
            raise ValueError(f"optim_args {name} is {text!r}; it is {words}") from None


_FLAGS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


@dataclass(frozen=True)
class Request:
    """An optimizer by name, its arguments, and the model for optimizers that need it."""

    name: str
    args: Any
    model: nn.Module | None
    options: OptimArgs

    @property
    def lr(self) -> dict[str, Any]:
        """The keyword of every optimizer."""
        return {"lr": self.args.learning_rate}

    @property
    def betas(self) -> tuple[float, float]:
        """Adam's two decays."""
        return self.args.adam_beta1, self.args.adam_beta2

    @property
    def rmsprop(self) -> dict[str, Any]:
        """The keywords of every RMSprop."""
        return self.lr | self.options.given(
            alpha=float, eps=float, weight_decay=float, momentum=float, centered=bool
        )

    @property
    def adam(self) -> dict[str, Any]:
        """The keywords of everything in Adam's family, the rate included."""
        return {**self.lr, "betas": self.betas, "eps": self.args.adam_epsilon}

    def wanted_model(self) -> nn.Module:
        """Return the model. Raises ValueError if none was given."""
        if self.model is None:
            raise ValueError(f"optim={self.name!r} needs the model; pass model= as well")
        return self.model


def library(module: str, optim: str, package: str) -> Any:
    """Import an optional library. Raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"optim={optim!r} comes with {package}, which cannot be imported ({error});"
            f" install it: pip install {package}"
        ) from error
