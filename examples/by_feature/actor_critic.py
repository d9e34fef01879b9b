"""An actor and a critic learn together, each at a rate of its own, in a bandit with a context: the
actor chooses, is paid 1 where the choice was right, and moves by how far that was above what the
critic had expected. The choices are made in the loss, so that they are always those of the actor as
it is; the labels of `base` stand for the world, and nothing else sees them."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from base import recipe, settings
from torch import nn

from drivetrain import Models, OptimizerGroup, OptimizerSettings, fit


def models():
    critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return Models({"actor": recipe.model(), "critic": critic})


def act(models, batch):
    """The sum over contexts."""
    contexts, right = batch
    policy = torch.distributions.Categorical(logits=models["actor"](contexts))
    choice = policy.sample()
    paid = (choice == right).float()
    expected = models["critic"](contexts).squeeze(-1)
    surprise = (paid - expected).detach()
    return F.mse_loss(expected, paid, reduction="sum") - (surprise * policy.log_prob(choice)).sum()


def measure(module, batch):
    chosen = module(lambda models, contexts: models["actor"](contexts).argmax(-1), batch[0])
    return {"paid": (chosen == batch[1]).sum()}


groups = (OptimizerGroup(pattern="actor.*", lr=1e-2), OptimizerGroup(pattern="critic.*", lr=3e-2))
result = fit(
    replace(
        recipe,
        model=models,
        loss=lambda module, batch: module(act, batch),
        measure=measure,
    ),
    replace(settings, epochs=20, optimizer=OptimizerSettings(groups=groups)),
    backend="cpu",
)
print(f"paid for {result.metrics['held_out']['paid']:.0%} of choices")
