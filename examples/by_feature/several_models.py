"""A student learns to say what a teacher says: two models in one run. Nothing of the teacher is
trained, so it is held in evaluation mode and has no part in the optimizer."""

from dataclasses import replace

import torch.nn.functional as F
from base import recipe, settings
from torch import nn

from drivetrain import Models, fit


def models():
    teacher = recipe.model()
    teacher.load_state_dict(learnt)
    student = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    return Models({"student": student, "teacher": teacher.requires_grad_(False)})


def distil(models, batch):
    """The sum over the batch of how far the student is from the teacher."""
    said = F.log_softmax(models["student"](batch[0]), dim=-1)
    meant = F.softmax(models["teacher"](batch[0]), dim=-1)
    return F.kl_div(said, meant, reduction="sum")


def loss(module, batch):
    return module(distil, batch)


learnt = fit(recipe, settings, backend="cpu", finish=nn.Module.state_dict).finish
result = fit(
    replace(recipe, model=models, loss=loss),
    replace(settings, epochs=20),
    backend="cpu",
    finish=lambda models: models["student"](recipe.train_data[:][0]),
)
labels = recipe.train_data[:][1]
print(f"the student is right about {(result.finish.argmax(-1) == labels).float().mean():.0%}")
