"""Replicated parameters of a model whose other parameters are sharded over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import keep_for_a_while, naming_collectives
from .peers import Peers


class ReplicatedParameters:
    """Averages gradients of replicated parameters that no library averages. `peers`: the ranks that
    hold these parameters, and communicate on `device`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], peers: Peers, device: torch.device
    ) -> None:
        self._all = list(parameters)
        self.peers, self.device = peers, device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained now."""
        return [p for p in self._all if p.requires_grad]

    def average(self, lowest: torch.dtype) -> None:
        """Average the gradients over the peers, added up in `lowest` or a wider dtype. A rank
        without a gradient adds zeros. A parameter without a gradient on any rank keeps None.
        """
        parameters = self.parameters
        if not parameters or self.peers.size == 1:
            return
        dtypes = [parameter.dtype.to_real() for parameter in parameters]
        dtype = functools.reduce(torch.promote_types, dtypes, lowest)
        present = [float(parameter.grad is not None) for parameter in parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat(
            [
                torch.tensor(present, dtype=dtype, device=self.device),
                *(_numbers(grad).to(dtype) for grad in grads),
            ]
        )
        with naming_collectives("averaging gradients of replicated parameters", self.peers.rank):
            dist.all_reduce(keep_for_a_while(flat), group=self.peers.group)
        sizes = [_numbers(grad).numel() for grad in grads]
        found, *parts = torch.split(flat / self.peers.size, [len(grads), *sizes])
        for parameter, ranks, mean in zip(parameters, found.tolist(), parts, strict=True):
            parameter.grad = _shaped(mean, parameter) if ranks else None


def _numbers(grad: Tensor) -> Tensor:
    """Return the real numbers of a gradient in a row: two for each complex element."""
    grad = grad.detach().resolve_conj()
    return (torch.view_as_real(grad) if grad.is_complex() else grad).reshape(-1)


def _shaped(numbers: Tensor, like: Tensor) -> Tensor:
    """Return the gradient, shaped like its parameter, from its real numbers."""
    real = numbers.to(like.dtype.to_real())
    if like.is_complex():
        return torch.view_as_complex(real.view(*like.shape, 2))
    return real.view_as(like)
