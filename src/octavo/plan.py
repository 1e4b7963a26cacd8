"""Memory and communication of a training run on many GPUs, worked out and not measured.

Every figure is one of the formulas of ``docs/scale.md``, which cites where each comes from.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.errors import UserError
from octavo.training.fsdp import why_not_8_bits
from octavo.training.recipes import RECIPES, Recipe, get_recipe

GB = 1e9
BF16, FP32, FP8 = 2, 4, 1
STATE_BYTES = {"weights": FP32, "gradients": FP32, "optimizer": 2 * FP32}
"""A parameter's bytes on the rank that owns it: float32 weight and gradient, AdamW's two moments."""
LOSS_CHUNKS = 8
"""Logits exist for an eighth of the tokens at a time, as in TorchTitan's chunked loss."""
PREFETCHED = 2
"""Layers whose weights are whole at a time: the one that computes and the next."""
BLOCK = 128 * 128
"""Weights that share a scale where there are several; each scale is 4 bytes in the step that joins them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a decoder. ``experts`` is 0 for a dense one; ``latent`` holds DeepSeek's (q_rank, kv_rank,
    rope width) of multi-head latent attention, or is None for grouped-query attention."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    latent: tuple[int, int, int] | None = None
    dense_layers: int | None = None
    experts: int = 0
    active: int = 0
    shared: int = 0
    expert_ffn: int = 0
    source: str = ""

    @property
    def moe_layers(self) -> int:
        """Layers with experts, behind the dense ones."""
        return 0 if self.dense_layers is None else self.layers - self.dense_layers

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        query, value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is None:
            return self.dim * (query + 2 * value) + query * self.dim
        q_rank, kv_rank, rope = self.latent
        queries = self.dim * q_rank + q_rank * self.heads * (self.head_dim + rope) + q_rank
        keys = self.dim * (kv_rank + rope) + kv_rank * self.heads * 2 * self.head_dim + kv_rank
        return queries + keys + query * self.dim

    @property
    def expert_parameters(self) -> int:
        """Of the routed experts of one layer."""
        return self.experts * 3 * self.dim * self.expert_ffn

    def layer_parameters(self, moe: bool) -> int:
        """Of one layer without its routed experts."""
        mlp = 3 * self.dim * (self.shared * self.expert_ffn if moe else self.ffn)
        router = self.dim * self.experts + self.experts if moe else 0
        return self.attention_parameters + mlp + router + 2 * self.dim

    @property
    def parameters(self) -> int:
        """Of the whole model, with separate embedding and head."""
        dense = self.layers - self.moe_layers
        layers = dense * self.layer_parameters(False) + self.moe_layers * self.layer_parameters(True)
        return layers + self.moe_layers * self.expert_parameters + 2 * self.vocabulary * self.dim + self.dim

    @property
    def active_parameters(self) -> int:
        """Parameters that multiply a token: all but the embedding and the experts it is not sent to."""
        idle = self.moe_layers * (self.experts - self.active) * 3 * self.dim * self.expert_ffn
        return self.parameters - idle - self.vocabulary * self.dim


MODELS: dict[str, Shape] = {
    "llama3-8b": Shape(
        dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14_336, vocabulary=128_256,
        source="arXiv:2407.21783, table 3",
    ),
    "llama3-70b": Shape(
        dim=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28_672, vocabulary=128_256,
        source="arXiv:2407.21783, table 3",
    ),
    "deepseek-v3": Shape(
        dim=7168, layers=61, heads=128, kv_heads=128, head_dim=128, ffn=18_432, vocabulary=129_280,
        latent=(1536, 512, 64), dense_layers=3, experts=256, active=8, shared=1, expert_ffn=2048,
        source="arXiv:2412.19437, section 4.2, without the multi-token prediction layer",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How GPUs and tokens are laid out.

    Args:
        gpus: all of them.
        tp, ep, pp: GPUs of a tensor-parallel group, of an expert-parallel group, and pipeline stages. Expert
            parallelism takes its ranks from the data- and tensor-parallel ones, as in TorchTitan.
        tokens: that a data-parallel rank computes in one micro-batch.
        micro_batches: a step; with a pipeline at least as many as stages.
        full_checkpointing: keep each layer's input alone and compute the layer again in backward.
        gather_8_bits: FSDP2 gathers weights in 8 bits where the recipe allows it.
    """

    gpus: int
    tp: int = 1
    ep: int = 1
    pp: int = 1
    tokens: int = 8192
    micro_batches: int = 1
    full_checkpointing: bool = False
    gather_8_bits: bool = True

    @property
    def dp(self) -> int:
        """Data-parallel ranks, over which FSDP2 shards."""
        return self.gpus // (self.tp * self.pp)

    def check(self, shape: Shape) -> None:
        """Raises :class:`octavo.errors.UserError` where the layout does not fit itself or the model."""
        for name in ("gpus", "tp", "ep", "pp", "tokens", "micro_batches"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give at least 1")
        if self.gpus % (self.tp * self.pp):
            raise UserError(
                f"{self.gpus} GPUs do not split into --tp {self.tp} times --pp {self.pp}: change one of them"
            )
        if self.ep > 1 and not shape.experts:
            raise UserError(f"--ep is {self.ep} and the model has no experts: leave it out")
        if (self.dp * self.tp) % self.ep or (shape.experts and shape.experts % self.ep):
            raise UserError(
                f"--ep {self.ep} must divide the {self.dp * self.tp} GPUs of a pipeline stage and the "
                f"{shape.experts} experts"
            )
        if shape.heads % self.tp or shape.kv_heads % self.tp:
            raise UserError(
                f"--tp {self.tp} must divide {shape.heads} heads and {shape.kv_heads} of keys and values"
            )
        if self.pp > shape.layers:
            raise UserError(f"--pp is {self.pp} and the model has {shape.layers} layers: give fewer stages")
        if self.micro_batches < self.pp:
            raise UserError(
                f"--micro-batches is {self.micro_batches}: a pipeline of {self.pp} stages needs at least {self.pp}"
            )


@dataclass(frozen=True)
class Plan:
    """Bytes a GPU, by what they are for, and operations; ``notes`` say what was taken for granted."""

    model: str
    recipe: str
    layout: Layout
    parameters: int
    memory: dict[str, float]
    communication: dict[str, float]
    flops: float
    flops_in_8_bits: float
    notes: tuple[str, ...] = field(default=())

    @property
    def total_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def total_communication(self) -> float:
        return sum(self.communication.values())

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": "plan, from formulas, not measured",
            "model": self.model,
            "recipe": self.recipe,
            "layout": {**asdict(self.layout), "dp": self.layout.dp},
            "parameters": self.parameters,
            "memory_bytes_per_gpu": {**self.memory, "total": self.total_memory},
            "communication_bytes_per_gpu_and_step": {**self.communication, "total": self.total_communication},
            "flops_per_gpu_and_step": {"total": self.flops, "in_8_bits": self.flops_in_8_bits},
            "notes": list(self.notes),
        }


def plan(model: str, recipe: str, layout: Layout) -> Plan:
    """Memory and communication a GPU of ``model`` by ``recipe`` on ``layout``.

    Raises:
        UserError: for an unknown model or recipe, or a layout that does not fit.
    """
    if model not in MODELS:
        raise UserError(f"unknown model {model!r}: choose one of {', '.join(MODELS)}")
    if recipe not in RECIPES:
        raise UserError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    shape, chosen = MODELS[model], get_recipe(recipe)
    layout.check(shape)
    share = len(chosen.quantized_products) / 3
    flops = 6.0 * shape.active_parameters * layout.tokens * layout.micro_batches / (layout.tp * layout.pp)
    head = 6.0 * shape.vocabulary * shape.dim * layout.tokens * layout.micro_batches / (layout.tp * layout.pp)
    return Plan(
        model=model,
        recipe=recipe,
        layout=layout,
        parameters=shape.parameters,
        memory=_memory(shape, chosen, layout),
        communication=_communication(shape, chosen, layout),
        flops=flops,
        flops_in_8_bits=share * (flops - head),
        notes=_notes(chosen, layout, shape),
    )


def _gather_bytes(recipe: Recipe, layout: Layout) -> int:
    """Bytes of a gathered weight."""
    return FP8 if layout.gather_8_bits and why_not_8_bits(recipe) is None else BF16


def _stage(shape: Shape, layout: Layout) -> tuple[float, float]:
    """(dense layers, layers with experts) of the fullest stage, taken in proportion."""
    dense = (shape.layers - shape.moe_layers) / layout.pp
    return dense, shape.moe_layers / layout.pp


def _local_layer(shape: Shape, layout: Layout, moe: bool) -> tuple[float, float]:
    """(parameters without experts, of experts) that a rank holds of one layer while it is whole."""
    experts = shape.expert_parameters / layout.ep if moe else 0.0
    return shape.layer_parameters(moe) / layout.tp, experts


def _memory(shape: Shape, recipe: Recipe, layout: Layout) -> dict[str, float]:
    owned = shape.parameters / layout.gpus
    result = {name: owned * size for name, size in STATE_BYTES.items()}
    moe = shape.moe_layers > 0
    layer = sum(_local_layer(shape, layout, moe))
    gathered = _gather_bytes(recipe, layout)
    result["gathered weights"] = PREFETCHED * layer * gathered
    result["gradients before reduction"] = layer * BF16
    # A weight that came in 16 bits is quantized when it is used, one at a time: the largest counts.
    quantized = bool(recipe.quantized_products) and gathered == BF16
    largest = max(
        2 * shape.dim * shape.ffn / layout.tp, shape.expert_parameters * 2 / 3 / layout.ep if moe else 0
    )
    result["quantized weights"] = FP8 * largest if quantized else 0.0
    tokens = layout.tokens / layout.tp
    kept, working = activation_bytes(shape, recipe, layout)
    dense_layers, moe_layers = _stage(shape, layout)
    layers = dense_layers + moe_layers
    in_flight = min(layout.pp, layout.micro_batches)
    if layout.full_checkpointing:
        per_layer = BF16 * shape.dim * tokens
        result["activations"] = in_flight * layers * per_layer + kept
    else:
        result["activations"] = in_flight * layers * kept
    result["working memory of a layer"] = working
    # Logits in 16 bits, in float32 and their gradient in float32.
    result["logits"] = shape.vocabulary / layout.tp * layout.tokens / LOSS_CHUNKS * (BF16 + 2 * FP32)
    return result


def activation_bytes(shape: Shape, recipe: Recipe, layout: Layout) -> tuple[float, float]:
    """(bytes kept of a layer for backward, bytes that its backward needs on top), of the largest kind of layer.

    Kept, a token: the inputs of both norms (16 bits), the quantized copy of each projection's input where
    grad_weight runs in 8 bits and the 16-bit one where it does not, q, k, v and the attention's output and
    log-sum-exp, gate and up (16 bits). With tensor and sequence parallelism everything is 1 / tp of it.
    """
    tokens = layout.tokens / layout.tp
    saved = FP8 if recipe.grad_weight is not None else BF16
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * BF16 * shape.dim
    attention = saved * shape.dim + BF16 * (query + 2 * value) + BF16 * query + FP32 * shape.heads
    # In 16 bits the attention's output is the very input of the projection behind it.
    attention += saved * query if saved == FP8 else 0
    if shape.latent is not None:
        q_rank, kv_rank, rope = shape.latent
        attention += (BF16 + saved) * (q_rank + kv_rank) + BF16 * rope * 2 * shape.heads
    if shape.moe_layers:
        width = (shape.active + shape.shared) * shape.expert_ffn
        inputs = (saved + BF16) * shape.active * shape.dim + saved * shape.dim
        working_width = width
    else:
        width, inputs, working_width = shape.ffn, saved * shape.dim, shape.ffn
    # BF16 keeps gate, up, silu(gate) and the activation; the 8-bit MLP keeps gate and up.
    mlp = (2 if recipe.output is not None else 4) * BF16 * width + inputs
    # Gradients of the activation, of gate and up; in 8 bits both of the latter twice and the activation again.
    working = (
        (2 * BF16 + 4 * BF16) * width if recipe.output is None else (BF16 + 4 * FP8 + FP8) * working_width
    )
    return tokens * (norms + attention + mlp), tokens * working


def _communication(shape: Shape, recipe: Recipe, layout: Layout) -> dict[str, float]:
    gathered = _gather_bytes(recipe, layout)
    dense_layers, moe_layers = _stage(shape, layout)
    # Experts are sharded over the ranks that hold the same experts.
    expert_ranks = layout.dp * layout.tp // layout.ep
    dense = dense_layers * shape.layer_parameters(False) + moe_layers * shape.layer_parameters(True)
    dense /= layout.tp
    experts = moe_layers * shape.expert_parameters / layout.ep
    ends = 2 * shape.vocabulary * shape.dim / layout.tp / layout.pp
    over, over_experts = _ring(layout.dp), _ring(expert_ranks)
    # Weights are gathered for forward and again for backward of every micro-batch; head and embedding in 16 bits.
    weights = over * (dense * gathered + ends * BF16) + over_experts * experts * gathered
    result = {
        "FSDP all-gather": 2 * layout.micro_batches * weights,
        "FSDP reduce-scatter": FP32 * (over * (dense + ends) + over_experts * experts),
        "scales": 2 * FP32 * (over * dense + over_experts * experts) / BLOCK if gathered == FP8 else 0.0,
    }
    hidden = BF16 * shape.dim * layout.tokens * layout.micro_batches
    # A gather and a scatter around attention and around the MLP, forward and backward.
    result["tensor parallel"] = 8 * _ring(layout.tp) * hidden * (dense_layers + moe_layers)
    # To the experts and back, forward and backward, every chosen expert apart.
    routed = hidden / layout.tp * shape.active
    result["expert parallel"] = 4 * _ring(layout.ep) * routed * moe_layers
    result["pipeline"] = 2.0 * hidden / layout.tp if layout.pp > 1 else 0.0
    return result


def _ring(ranks: int) -> float:
    """Share of a tensor that each of ``ranks`` receives in an all-gather or sends in a reduce-scatter."""
    return (ranks - 1) / ranks


def _notes(recipe: Recipe, layout: Layout, shape: Shape) -> tuple[str, ...]:
    notes = [
        "a plan from formulas (docs/scale.md), not a measurement; allocator and library workspaces come on top"
    ]
    reason = why_not_8_bits(recipe)
    if layout.gather_8_bits and reason is not None and recipe.quantized_products:
        notes.append(f"weights are gathered in 16 bits: {reason}")
    if layout.pp > 1:
        bubble = (layout.pp - 1) / (layout.micro_batches + layout.pp - 1)
        notes.append(f"a pipeline of one stage a GPU idles {bubble:.0%} of a step")
    if shape.experts:
        notes.append("tokens are taken as evenly spread over the experts")
    return tuple(notes)


def format_bytes(count: float) -> str:
    """In decimal units, three digits."""
    if count <= 0:
        return "-"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"
