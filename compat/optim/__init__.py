"""The optimizers that `optim=` names: which class, with which keywords; each its library's own."""

from .table import OPTIMIZERS, optimizer_class_and_kwargs

__all__ = ["OPTIMIZERS", "optimizer_class_and_kwargs"]
