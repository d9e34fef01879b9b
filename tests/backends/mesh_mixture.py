"""A small decoder whose layers are mixtures of experts, to test expert parallelism on.

The last two of its six experts are never chosen, so that on three ranks one receives no token.
Neither their width (15) nor their number is convenient to divide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mesh_decoder import (
    HEADS,
    VOCABULARY,
    WIDTH,
    observed,
    parts_of,
    turn,
)
from mesh_decoder import loss as cross_entropy
from mesh_faults import plant
from torch import Tensor, nn

from drivetrain import Parallel, Recipe
from drivetrain.conformance.bench import Bench

EXPERTS, CHOSEN, HIDDEN = 6, 2, 15

TENSOR: dict[str, Any] = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "layers.*.qkv": "column",
    "layers.*.out": "row",
}
PARALLEL = Parallel(
    experts=["layers.*.experts"],
    tensor=TENSOR,
    fused={"layers.*.qkv": 3},
    sequence={"tokens": 1, "targets": 1},
    positions="positions",
)
ON_PARTS = ("norm", "layers.*.norm?", "layers.*.router", "layers.*.experts")
IN_SEQUENCE: dict[str, Any] = {**TENSOR, **dict.fromkeys(ON_PARTS, "sequence")}
PLANS = {"plain": PARALLEL, "in sequence": dataclasses.replace(PARALLEL, tensor=IN_SEQUENCE)}


class Experts(nn.Module):
    """Experts from (N, D) tokens and (N, K) indices and weights to (N, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in indices.unique().tolist():
            own, turn = (indices == expert).nonzero(as_tuple=True)
            hidden = F.gelu(tokens[own] @ self.up[expert] + self.bias[expert])
            answer = (hidden @ self.down[expert]) * weights[own, turn, None]
            result = result.index_add(0, own, answer.to(result.dtype))
        return result


class Normalising(Experts):
    """Experts whose output depends on the other tokens that they receive."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens - tokens.mean(0), indices, weights)


class InGroups(Experts):
    """Experts computed by one product each, on tokens sorted by expert."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        groups = tokens[order // indices.shape[-1]].split(counts)
        answers = [
            F.gelu(group @ self.up[expert] + self.bias[expert]) @ self.down[expert]
            for expert, group in enumerate(groups)
        ]
        weighed = torch.cat(answers) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // indices.shape[-1], weighed)


class Apart(nn.ModuleList):
    """Experts that are separate modules."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        chosen = F.one_hot(indices, EXPERTS).to(weights.dtype) * weights[..., None]
        answers = torch.stack([expert(tokens) for expert in self], 1)
        return torch.einsum("ne,ned->nd", chosen.sum(1), answers)


class Unweighted(Experts):
    """Experts whose forward takes no weights."""

    def forward(self, tokens: Tensor, indices: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, indices, torch.ones_like(indices, dtype=tokens.dtype))


KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (Experts, InGroups, Normalising, Apart, Unweighted)
}


class Layer(nn.Module):
    """A layer of attention and experts. With `routed`, it also returns the router's part of the
    loss: how far the router's logits are from 0.
    """

    def __init__(self, kind: str, routed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = KINDS[kind]()
        self.weighs, self.routed = kind != "Unweighted", routed

    def forward(self, x: Tensor, angles: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        query, key, value = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        turned = (turn(query, angles), turn(key, angles), value)
        mixed = F.scaled_dot_product_attention(*turned, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        numbers = self.router(tokens).float()
        never = torch.arange(EXPERTS, device=x.device) >= EXPERTS - 2
        weights, indices = numbers.masked_fill(never, -1e9).softmax(-1).topk(CHOSEN)
        given = (tokens, indices, weights / weights.sum(-1, keepdim=True))
        answers = self.experts(*given[: 3 if self.weighs else 2])
        x = x + answers.unflatten(0, x.shape[:2])
        return (x, numbers.logsumexp(-1).square().sum()) if self.routed else x


class Mixture(nn.Module):
    def __init__(self, kind: str = "Experts", routed: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.routed = routed
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(kind, routed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        self.register_buffer("speeds", 100.0 ** (-torch.arange(half) / half))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = (positions[..., None] * self.speeds)[:, None]
        x, far = self.embed(tokens), torch.zeros((), device=tokens.device)
        for layer in self.layers:
            x = layer(x, angles)
            if self.routed:
                x, more = x
                far = far + more
        return self.head(self.norm(x)), far


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a loss that includes the router's own term (https://arxiv.org/abs/2202.08906), which
    is a sum over tokens, too.
    """
    far: list[Tensor] = []

    def logits(*given: Any) -> Tensor:
        found, more = module(*given)
        far.append(more)
        return found

    return cross_entropy(logits, batch) + 1e-2 * far[0]  # type: ignore[arg-type]


def train(
    bench: Bench,
    *,
    steps: int = 4,
    kind: str = "Experts",
    settings: Mapping[str, Any] | None = None,
    out: str | None = None,
    resume: str | None = None,
    fault: str = "",
    plan: str = "plain",
    routed: bool = True,
    layers: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    """A job: train; return the curve, the results of an evaluation, and the final weights."""
    if fault:
        plant(fault)
    parts = {
        "model": lambda: Mixture(kind, routed, layers),
        "loss": loss,
        "parallel": dataclasses.replace(PLANS[plan], **changes),
    }
    # by default a gradient that is nothing but rounding moves a weight as any other does
    steady = {"optimizer.args": {"eps": 1e-6}}
    chosen = {"steps": steps, "micro_batch": 2, "evaluate.every": 2, **steady, **(settings or {})}
    return observed(bench, parts, chosen, out=out, resume=resume)


def parts(bench: Bench, *, source: str) -> Sequence[dict[str, Any]]:
    """A job: read a checkpoint, and return what this rank would write."""
    return parts_of(bench, Recipe(model=Mixture, loss=loss, parallel=PARALLEL), source)


def of_transformers(bench: Bench, *, name: str, how: str = "eager") -> dict[str, Any]:
    """A job: train the named model of transformers in small, with the named implementation of its
    experts.
    """
    import transformers

    def model() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=32,
            num_local_experts=4, num_experts_per_tok=2, experts_implementation=how,
            moe_intermediate_size=16, head_dim=8, num_experts=4,
        )  # fmt: skip
        built: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return built

    parts = {
        "model": model,
        "loss": lambda module, batch: cross_entropy(
            lambda tokens, _: module(input_ids=tokens).logits,  # type: ignore[arg-type]
            batch,
        ),
        "parallel": Parallel(experts=["model.layers.*.mlp.experts"]),
    }
    return observed(bench, parts, {"steps": 3})
