"""Diffusion on the digits that scikit-learn carries: a small network learns to predict the noise in
an image, and then draws digits from nothing but noise.

::

    drivetrain train examples/tasks/diffusion.py

At the end it prints two digits that it drew (`sample`). The share of noise goes from none to all in
100 steps; Ho et al., https://arxiv.org/abs/2006.11239, with the cosine schedule of Nichol and
Dhariwal, https://arxiv.org/abs/2102.09672. Shapes: B images of 64 pixels.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

from drivetrain import OptimizerSettings, Recipe, ScheduleSettings, Settings

STEPS = 100
KEPT = torch.cos(torch.linspace(0, 0.49, STEPS + 1) * math.pi).square()
"""The share of the image's variance that is left after each step."""

item_name = "images"
settings = Settings(
    epochs=100,
    global_batch=128,
    log_every=50,
    optimizer=OptimizerSettings(lr=3e-3),
    schedule=ScheduleSettings(name="cosine", warmup=20, final=0.0),
)


class Denoiser(nn.Module):
    """The noise in an image (B, 64), given the step (B) that it is at."""

    def __init__(self):
        super().__init__()
        self.steps = nn.Embedding(STEPS + 1, 32)
        self.layers = nn.Sequential(
            nn.Linear(64 + 32, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64)
        )

    def forward(self, images, steps):
        return self.layers(torch.cat([images, self.steps(steps)], dim=1))


def noised(images, steps, noise):
    """The images as they are at those steps."""
    kept = KEPT.to(images.device)[steps].unsqueeze(1)
    return kept.sqrt() * images + (1 - kept).sqrt() * noise


def error(module, images, steps, noise):
    """The mean over pixels, summed over images."""
    return (module(noised(images, steps, noise), steps) - noise).square().mean(1).sum()


def loss(module, images):
    """Return the error at steps and with noise that are drawn again each time."""
    steps = torch.randint(1, STEPS + 1, (len(images),), device=images.device)
    return error(module, images, steps, torch.randn_like(images))


def measure(module, images):
    """Measure the error at all steps, with noise that is always the same."""
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(images.device)
    steps = 1 + torch.arange(len(images), device=images.device) % STEPS
    return {"loss": error(module, images, steps, noise.expand_as(images))}


def draw(module, count):
    """Images (count, 64), from noise, one step after the other."""
    images = torch.randn(count, 64, device=next(module.parameters()).device)
    for step in range(STEPS, 0, -1):
        noise = module(images, torch.full((count,), step, device=images.device))
        kept, before = KEPT[step], KEPT[step - 1]
        clean = ((images - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1, 1)
        noise = (images - kept.sqrt() * clean) / (1 - kept).sqrt()
        images = before.sqrt() * clean + (1 - before).sqrt() * noise
    return images


@torch.no_grad()
def sample(module):
    """Two digits, in characters."""
    pictures = []
    for image in draw(module, 2).view(2, 8, 8):
        shades = ((image + 1) / 2 * 4).round().long().clamp(0, 4)
        pictures.append(["".join(" .:*#"[shade] * 2 for shade in row) for row in shades.tolist()])
    return "\n".join(f"{left}    {right}" for left, right in zip(*pictures, strict=True))


def recipe():
    """Every tenth digit is held out; pixels go from -1 to 1."""
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    held_out = torch.arange(len(images)) % 10 == 9
    return Recipe(
        model=Denoiser,
        loss=loss,
        train_data=images[~held_out],
        eval_data={"held_out": images[held_out]},
        measure=measure,
    )
