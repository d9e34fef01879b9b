"""The optimizers that `optim=` names: the class of each, from its own library, and its keywords."""

from .table import OPTIMIZERS, optimizer_class_and_kwargs

__all__ = ["OPTIMIZERS", "optimizer_class_and_kwargs"]
