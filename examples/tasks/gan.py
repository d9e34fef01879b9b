"""A generative adversarial network on the digits that scikit-learn carries: one network draws, the
other distinguishes drawings from digits, and their updates take turns.

::

    drivetrain train examples/tasks/gan.py

At the end it prints two digits that it drew (`sample`). Goodfellow et al.,
https://arxiv.org/abs/1406.2661; each network has a learning rate of its own (Heusel et al.,
https://arxiv.org/abs/1706.08500). Shapes: B images of 64 pixels.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from drivetrain import Models, OptimizerGroup, OptimizerSettings, Recipe, Settings, Turns

NOISE = 16

item_name = "images"
settings = Settings(
    steps=1500,
    global_batch=64,
    log_every=100,
    optimizer=OptimizerSettings(
        args={"betas": (0.5, 0.99)},
        groups=(
            OptimizerGroup(pattern="critic.*", lr=2e-3),
            OptimizerGroup(pattern="artist.*", lr=1e-3),
        ),
    ),
)


def models():
    artist = nn.Sequential(
        nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, 64), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 128),
        nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1),
    )  # fmt: skip
    return Models({"artist": artist, "critic": critic})


def draw(models, count):
    """Images (count, 64), from noise."""
    device = next(models.parameters()).device
    return models["artist"](torch.randn(count, NOISE, device=device))


def critic_loss(models, images):
    """Digits are to be above zero, what was drawn below; the sum over images."""
    with torch.no_grad():
        drawn = draw(models, len(images))
    return (F.softplus(-models["critic"](images)) + F.softplus(models["critic"](drawn))).sum()


def artist_loss(models, images):
    """Reward drawings that the critic takes for digits. The critic is a constant here."""
    return F.softplus(-models["critic"](draw(models, len(images)))).sum()


def predict(module, images):
    """Return how well each image passes for a digit."""
    return module(lambda models, images: models["critic"](images), images)


@torch.no_grad()
def sample(models):
    """Two digits, in characters."""
    pictures = []
    for image in draw(models, 2).view(2, 8, 8):
        shades = ((image + 1) / 2 * 4).round().long().clamp(0, 4)
        pictures.append(["".join(" .:*#"[shade] * 2 for shade in row) for row in shades.tolist()])
    return "\n".join(f"{left}    {right}" for left, right in zip(*pictures, strict=True))


def recipe():
    """Every tenth digit is held out; pixels go from -1 to 1."""
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    held_out = torch.arange(len(images)) % 10 == 9
    turns = Turns({"critic": critic_loss, "artist": artist_loss})
    return Recipe(
        model=models,
        loss=turns,
        train_data=images[~held_out],
        eval_data={"held_out": images[held_out]},
        measure=turns.measure,
    )
