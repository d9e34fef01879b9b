"""Faults of a device, each with the check that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SGD = "1_gradient-plain_sgd_equals_one_process"
ADAMW = "1_gradient-clipped_adamw_equals_one_process"
CLIPPED = "2_norm-clipping_limits_the_update"
SAME_BITS = "5_evaluation-training_is_bitwise_the_same"
RESUMED = "6_resume-resumed_run_is_bit_exact-stops=2_7"


@dataclass(frozen=True)
class Fault:
    """`plant` lets the device misbehave until its attributes are restored. `caught_by` is a part of
    a case's name."""

    caught_by: str
    plant: Callable[[Any], None]


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda device: setattr(device, name, value)


def replace(*names: str, by: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda device: device.replaced.update({f"aten::{name}": by for name in names})


# --- random numbers -------------------------------------------------------------------------------


def forget_state(device: Any) -> None:
    """A state that is always that of a new generator."""
    device.get_rng_state = lambda device=None: torch.Generator().get_state()


# --- copies ---------------------------------------------------------------------------------------


class DropOne:
    """Leaves one in fifty copies in that direction out. Zeros are found in their place, since what
    memory happens to hold could fail another check first."""

    def __init__(self, source: str, target: str) -> None:
        self.way, self.count = (source, target), 0

    def __call__(self, copy: Any, here: Tensor, source: str, target: str) -> None:
        self.count += (source, target) == self.way
        dropped = (source, target) == self.way and not self.count % 50
        copy(torch.zeros_like(here) if dropped else here)


class Late:
    """Copies to the host arrive when the next one is made."""

    def __init__(self) -> None:
        self.pending: list[Any] = []

    def __call__(self, copy: Any, here: Tensor, source: str, target: str) -> None:
        if target != "cpu":
            copy(here)
            return
        while self.pending:
            self.pending.pop()()
        kept = here.clone()
        self.pending.append(lambda: copy(kept))


# --- operations -----------------------------------------------------------------------------------


def always_finite(operation: Any, tensor: Tensor, *args: Any) -> Tensor:
    return torch.ones_like(tensor, dtype=torch.bool)


def in_16_bits(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes matrix products in bfloat16."""
    lowered = [
        a.bfloat16() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args
    ]
    made = operation(*lowered, **kwargs)
    return made.float() if args[0].dtype == torch.float32 else made


def once_a_row(
    operation: Any, gradient: Tensor, indices: Tensor, rows: int, *rest: Any, **named: Any
) -> Tensor:
    """The gradient of an embedding counts each row once, however often it was used."""
    made: Tensor = operation(gradient, indices, rows, *rest, **named)
    used = torch.bincount(indices.reshape(-1), minlength=rows).clamp(min=1)
    return made / used.unsqueeze(1)


def absolute_norms(operation: Any, tensors: list[Tensor], *args: Any, **named: Any) -> Any:
    """Takes norms of order 1."""
    return operation(tensors, 1)


def unmoved(operation: Any, tensors: list[Tensor], *args: Any, **named: Any) -> None:
    """Leaves the tensors as they are."""


def unscaled(operation: Any, tensors: list[Tensor], factor: Any) -> None:
    """Multiplies only the first tensor."""
    operation(tensors[:1], factor)


def grown(operation: Any, scale: Tensor, *rest: Any) -> Tensor:
    """Doubles the loss scale whatever was found."""
    scale.mul_(2)
    return scale


def as_memory_lies(operation: Any, *args: Any, **named: Any) -> Any:
    """Reads a transposed matrix as its memory lies."""
    read = [
        a.as_strided(a.shape, (a.shape[1], 1)) if isinstance(a, Tensor) and a.dim() == 2 else a
        for a in args
    ]
    return operation(*read, **named)


def first_alone(operation: Any, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Leaves the tensor as it is instead of adding to it."""
    return tensor


def all_pass(operation: Any, gradient: Tensor, *rest: Any) -> Tensor:
    """Lets each gradient pass through a ReLU."""
    return gradient.clone()


def unlimited(operation: Any, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
    return tensor.clone()


def roughly(operation: Any, values: Any, *rest: Any) -> Any:
    """Rounds results to 16 bits."""
    made = operation(values, *rest)
    rounded = [
        each.bfloat16().to(each.dtype) for each in ([made] if isinstance(made, Tensor) else made)
    ]
    return rounded[0] if isinstance(made, Tensor) else rounded


def without_statistics(
    operation: Any, values: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any
) -> Any:
    """Leaves running statistics as they are."""
    return operation(values, weight, bias, mean.clone(), variance.clone(), *rest)


FAULTS = {
    "the state of random numbers is not saved": Fault(RESUMED, forget_state),
    "the state of random numbers is not restored": Fault(
        RESUMED, set_to("set_rng_state", lambda state, device=None: None)
    ),
    "the seed is ignored": Fault(SAME_BITS, set_to("manual_seed_all", lambda seed: None)),
    "a copy to the device is dropped": Fault(SGD, replace("_copy_from", by=DropOne("cpu", "sim"))),
    "a copy to the host is dropped": Fault(
        RESUMED, replace("_copy_from", by=DropOne("sim", "cpu"))
    ),
    "a copy is read too early": Fault(SGD, replace("_copy_from", by=Late())),
    "autocast casts nothing": Fault(
        "1_gradient-low_precision_stays_near", set_to("autocast_dtype", lambda: torch.float32)
    ),
    "what is not finite looks finite": Fault(
        "3_not_applied-one_bad_rank_spoils_the_update_of_none",
        replace("isfinite", "eq.Tensor", "ne.Scalar", by=always_finite),
    ),
    "matrix products in 16 bits": Fault(SGD, replace("mm", "addmm", by=in_16_bits)),
    "a row's gradient counts once": Fault(
        SGD + "-language", replace("embedding_dense_backward", by=once_a_row)
    ),
    "norms of another order": Fault(
        "2_norm-norm_is_that_of_one_process", replace("_foreach_norm.Scalar", by=absolute_norms)
    ),
    "clipping scales one tensor": Fault(CLIPPED, replace("_foreach_mul_.Tensor", by=unscaled)),
    "the loss scale grows on overflow": Fault(
        "3_not_applied-overflow_of_a_scaled_loss", replace("_amp_update_scale_", by=grown)
    ),
    "elements are not limited": Fault(
        "2_norm-clipping_limits_each_element",
        replace("_foreach_clamp_min_.Scalar", "_foreach_clamp_max_.Scalar", by=unmoved),
    ),
    "a transposed matrix is read as it lies": Fault(SGD, replace("mm", "addmm", by=as_memory_lies)),
    "sums of gradients are lost": Fault(SGD, replace("add_.Tensor", by=first_alone)),
    "a ReLU passes each gradient": Fault(SGD, replace("threshold_backward", by=all_pass)),
    "a factor has no limit": Fault(CLIPPED, replace("clamp", by=unlimited)),
    "a reciprocal in 16 bits": Fault(CLIPPED, replace("reciprocal", by=roughly)),
    "a count stands still": Fault(ADAMW, replace("_foreach_add_.Scalar", by=unmoved)),
    "square roots in 16 bits": Fault(ADAMW, replace("_foreach_sqrt", by=roughly)),
    "running statistics stand still": Fault(
        "6_buffers-one_process_normalises_as_plain_torch",
        replace("native_batch_norm", "_batch_norm_with_update", by=without_statistics),
    ),
}


# --- collectives ----------------------------------------------------------------------------------


def replace_collective(name: str, by: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda device: device.replaced.update({name: by})


def kept_back(act: Any, tensors: list[Tensor], *rest: Any) -> Any:
    """Adds up copies, and leaves each rank's own values where they are."""
    return act([each.clone() for each in tensors], *rest)


class OneLate:
    """Sums arrive when the next ones are asked for."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def __call__(self, act: Any, tensors: list[Tensor], *rest: Any) -> Any:
        for late, where in self.pending:
            where.copy_(late)
        copies = [each.clone() for each in tensors]
        self.pending = [*zip(copies, tensors, strict=True)]
        return act(copies, *rest)


def summed_in_16_bits(act: Any, tensors: list[Tensor], *rest: Any) -> Any:
    rounded = [each.bfloat16() if each.is_floating_point() else each for each in tensors]
    work = act(rounded, *rest)
    work.wait()
    for each, of in zip(tensors, rounded, strict=True):
        each.copy_(of)
    return work


def without_the_last(act: Any, tensors: list[Tensor], *rest: Any) -> Any:
    """Adds up all but the last element."""
    return act([each.view(-1)[:-1] if each.numel() > 1 else each for each in tensors], *rest)


FAULTS_OF_RANKS = {
    "sums over ranks are lost": Fault(SGD, replace_collective("allreduce", kept_back)),
    "sums over ranks arrive late": Fault(SGD, replace_collective("allreduce", OneLate())),
    "sums over ranks in 16 bits": Fault(SGD, replace_collective("allreduce", summed_in_16_bits)),
    "sums over ranks are one element short": Fault(
        SGD, replace_collective("allreduce", without_the_last)
    ),
    "buffers are not broadcast": Fault("6_buffers", replace_collective("broadcast", kept_back)),
}


# --- a device that can do less --------------------------------------------------------------------


def missing(operation: Any, *args: Any) -> Any:
    raise NotImplementedError(f"Could not run '{operation.name()}' on the 'sim' backend")


LACKS = {
    "memory runs out": set_to("most_bytes", 3000),
    "an operation is missing": replace("tanh", by=missing),
}
"""They end a step, or make it smaller; nothing computes wrongly."""
PLANTS = LACKS | {name: fault.plant for name, fault in (FAULTS | FAULTS_OF_RANKS).items()}
