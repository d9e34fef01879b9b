"""A forward and backward of one's own, here adversarial: the loss at inputs that were moved to make
it larger. What is given to `backward` is summed over microbatches, and averaged over feeders."""

from dataclasses import replace

import torch
from base import loss, recipe, settings

from drivetrain import fit


def step(module, batch, microstep):
    inputs, labels = batch
    inputs = inputs.detach().requires_grad_(True)
    with microstep.autocast():
        (gradient,) = torch.autograd.grad(loss(module, (inputs, labels)), inputs)
        moved = (inputs + 0.1 * gradient.sign()).detach()
        total = loss(module, (moved, labels))
    return microstep.backward(total, microstep.num_feeders / microstep.num_items())


result = fit(replace(recipe, step=step), settings, backend="cpu")
print(f"loss {result.loss:.3f}")
