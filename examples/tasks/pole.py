"""A pole is balanced on a cart: an actor pushes the cart left or right, a critic says how long the
pole will stay up. No data is given but where each try starts: what is learned from are the tries of
the actor as it is.

::

    drivetrain train examples/tasks/pole.py

`balanced` is the share of 100 pushes after which the pole still stands: 0.2 where pushes are by
chance, 1 where it never falls. The cart is that of Barto, Sutton and Anderson (1983,
https://doi.org/10.1109/TSMC.1983.6313077); advantages are by Schulman et al.,
https://arxiv.org/abs/1506.02438. Shapes: B tries of P pushes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Models, OptimizerGroup, OptimizerSettings, Recipe, Settings

PUSHES = 100
DISCOUNT, SMOOTHING = 0.98, 0.95

item_name = "tries"
settings = Settings(
    steps=60,
    global_batch=32,
    log_every=10,
    optimizer=OptimizerSettings(
        groups=(
            OptimizerGroup(pattern="actor.*", lr=5e-3),
            OptimizerGroup(pattern="critic.*", lr=1e-2),
        )
    ),
)


def models():
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    return Models({"actor": actor, "critic": critic})


def push(state, right):
    """The state (B, 4), place and angle with their speeds, a fiftieth of a second later."""
    _, speed, angle, turn = state.unbind(-1)
    force = torch.where(right.bool(), 10.0, -10.0)
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + 0.05 * turn.square() * sine) / 1.1
    turning = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    moving = pushed - 0.05 * turning * cosine / 1.1
    return torch.stack([speed, moving, turn, turning], -1).mul(0.02).add(state)


def stands(state):
    return (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)


def tried(models, state, choose):
    """States (P + 1, B, 4), pushes and whether the pole still stood before each (P, B)."""
    states, pushes, standing = [state], [], [stands(state)]
    with torch.no_grad():
        for _ in range(PUSHES):
            pushes.append(choose(models["actor"](state)))
            state = torch.where(standing[-1][:, None], push(state, pushes[-1]), state)
            states.append(state)
            standing.append(standing[-1] & stands(state))
    return torch.stack(states), torch.stack(pushes), torch.stack(standing)


def by_chance(logits):
    return torch.distributions.Categorical(logits=logits).sample()


def learn(models, starts):
    """The sum over tries. Each push after which the pole stands is worth 1."""
    states, pushes, standing = tried(models, starts, by_chance)
    expected = models["critic"](states).squeeze(-1)
    then = (expected * standing).detach()
    surprise = (standing[1:] + DISCOUNT * then[1:] - then[:-1]) * standing[:-1]
    advantage, later = torch.zeros_like(surprise), torch.zeros_like(surprise[0])
    for number in reversed(range(PUSHES)):
        later = advantage[number] = surprise[number] + DISCOUNT * SMOOTHING * later
    unlikely = F.cross_entropy(
        models["actor"](states[:-1]).movedim(-1, 1), pushes, reduction="none"
    )
    actor = advantage * unlikely
    critic = (expected[:-1] - then[:-1] - advantage).square() / 2
    return ((actor + critic) * standing[:-1]).sum() / PUSHES


def loss(module, starts):
    return module(learn, starts)


def measure(module, starts):
    """Count the steps for which the pole stands, with the pushes that the actor rates best."""
    standing = module(lambda models, s: tried(models, s, lambda x: x.argmax(-1))[2], starts)
    return {"balanced": standing[1:].float().mean(0).sum()}


def recipe():
    starts = torch.rand(512 + 64, 4, generator=torch.Generator().manual_seed(0)) * 0.1 - 0.05
    return Recipe(
        model=models,
        loss=loss,
        train_data=starts[:512],
        eval_data={"held_out": starts[512:]},
        measure=measure,
    )
