"""The training arguments and `optim_args` as an optimizer needs them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["OptimArgs", "Request", "library"]


class OptimArgs:
    """The values of `optim_args`, "name=value,name=value", read one by one.

    Each reader converts, or raises ValueError with the value seen; `unread` names what nobody
    asked for.
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

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str) -> str:
        """A word."""
        self.unread.discard(name)
        return self._values.get(name, default)

    def number(self, name: str, default: float) -> float:
        """A number with a fraction."""
        return float(self._read(name, float, default))

    def integer(self, name: str, default: int) -> int:
        """A whole number."""
        return int(self._read(name, int, default))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or False: "true", "yes", "on", "1" and their opposites."""
        text = self.text(name, str(default)).lower()
        if text not in _FLAGS:
            raise ValueError(f"optim_args {name} is {text!r}; it is true or false")
        return _FLAGS[text]

    def numbers(self, *names: str) -> dict[str, float]:
        """Those of the names that were given, as numbers with a fraction."""
        return {name: self.number(name, 0.0) for name in names if name in self}

    def flags(self, *names: str) -> dict[str, bool]:
        """Those of the names that were given, as True or False."""
        return {name: self.flag(name) for name in names if name in self}

    def _read(self, name: str, convert: Any, default: float) -> Any:
        text = self.text(name, str(default))
        try:
            return convert(text)
        except ValueError:
            kind = "a whole number" if convert is int else "a number"
            raise ValueError(f"optim_args {name} is {text!r}; it is {kind}") from None


_FLAGS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


@dataclass(frozen=True)
class Request:
    """An optimizer by name, the arguments around it, and the model for those that look into it."""

    name: str
    args: Any
    model: nn.Module | None
    options: OptimArgs

    @property
    def lr(self) -> dict[str, Any]:
        """The keyword that every optimizer takes."""
        return {"lr": self.args.learning_rate}

    @property
    def betas(self) -> tuple[float, float]:
        """Adam's two decays."""
        return self.args.adam_beta1, self.args.adam_beta2

    @property
    def adam(self) -> dict[str, Any]:
        """The keywords of everything in Adam's family, the rate included."""
        return {**self.lr, "betas": self.betas, "eps": self.args.adam_epsilon}

    def wanted_model(self) -> nn.Module:
        """The model. Raises ValueError where none was given."""
        if self.model is None:
            raise ValueError(f"optim={self.name!r} looks into the model; pass model= as well")
        return self.model


def library(module: str, optim: str, package: str) -> Any:
    """The module of an optional library; ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"optim={optim!r} comes with {package}, which cannot be imported ({error});"
            f" install it: pip install {package}"
        ) from error
