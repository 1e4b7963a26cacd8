"""What each rank does in the tests of tensor parallelism and pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_models import assert_same, dense, full, gradients, loss_of, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import octavo
from octavo.testing import sqnr

LAYER = (5, 24, 40, 56)
"""B, S, K, N of the single layer."""


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Megatron's plan for a decoder: projections by columns, then by rows; with ``sequence``, norms by tokens."""
    after = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=after),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=after),
    }
    if sequence:
        whole = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
        plan |= {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        parallelize_module(
            model, mesh, {"tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                          "norm": SequenceParallel(),
                          "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
        )  # fmt: skip
    for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        parallelize_module(layer, mesh, plan)
    return model


def decoder_is_close(recipes: list[str], sequence: bool) -> dict[str, tuple[float, float]]:
    """(relative distance of the loss, least SQNR of a gradient in dB) from one process, by recipe."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    seen = {}
    for recipe in recipes:
        alone, split = dense(recipe), tensor_parallel(dense(recipe), mesh, sequence)
        expected, loss = loss_of(alone), loss_of(split)
        expected.backward()
        loss.backward()
        expected_grads = gradients(alone)
        quality = min(sqnr(g, expected_grads[n].double()) for n, g in gradients(split).items())
        seen[recipe] = (abs(float(full(loss)) / float(expected.detach()) - 1), quality)
    return seen


def layer_placements(recipe: str) -> None:
    """Every placement of input and weight: output and gradients as from the shards by hand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    b, s, k, n = LAYER
    torch.manual_seed(0)
    x, g = torch.randn(b, s, k), torch.randn(b, s, n)
    for weight_placement in (Shard(0), Shard(1), Replicate()):
        for input_placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            layer = nn.Linear(k, n)
            for p in layer.parameters():
                dist.broadcast(p.data, 0)
            reference = nn.Linear(k, n)
            reference.load_state_dict(layer.state_dict())
            octavo.convert(nn.Sequential(layer), recipe)
            bias_placement = Shard(0) if weight_placement == Shard(0) else Replicate()
            for name, placement in (("weight", weight_placement), ("bias", bias_placement)):
                value = distribute_tensor(getattr(layer, name).detach(), mesh, [placement])
                setattr(layer, name, nn.Parameter(value))
            sharded = distribute_tensor(x, mesh, [input_placement]).requires_grad_()
            out = layer(sharded)
            assert isinstance(out, DTensor)
            assert out.shape == g.shape
            (out.full_tensor() * g).sum().backward()
            whole = x.clone().requires_grad_()
            expected = F.linear(whole, reference.weight, reference.bias)
            (expected * g).sum().backward()
            pairs = [
                (full(out), expected), (full(sharded.grad), whole.grad),
                (full(layer.weight.grad), reference.weight.grad), (full(layer.bias.grad), reference.bias.grad),
            ]  # fmt: skip
            for actual, wanted in pairs:
                quality = sqnr(actual, wanted.detach().double())
                floor = 90 if recipe == "bf16" else 20
                assert quality > floor, (weight_placement, input_placement, quality)


def layers_refuse_mixtures() -> str:
    """The message for a plain input to a layer whose weight is a DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = octavo.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    try:
        layer(torch.randn(2, 8))
    except ValueError as error:
        return str(error)
    return ""


def pending_sums_are_reduced_first() -> None:
    """A Partial input is summed before it is quantized."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = octavo.Linear(16, 16, bias=False, recipe="rowwise")
    dist.broadcast(layer.weight.data, 0)
    torch.manual_seed(dist.get_rank())
    part = torch.randn(4, 16)
    whole = part.clone()
    dist.all_reduce(whole)
    expected = layer(whole)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    out = layer(DTensor.from_local(part, mesh, [Partial()]))
    assert torch.equal(full(out), expected.detach())


def with_sharded_data(recipe: str) -> None:
    """Tensor parallelism inside FSDP2, gathered in 8 and in 16 bits: bit-equal losses and weights."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("shard", "tp"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    states = []
    for prepare in (False, True):
        model = tensor_parallel(dense(recipe, hidden=256), mesh["tp"], sequence=False)
        if prepare:
            assert len(octavo.prepare_fsdp(model).in_8_bits) == 14
        shard(model, mesh["shard"], mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append({"loss": full(loss), **{n: full(p) for n, p in model.named_parameters()}})
    assert_same(*states)


class Half(nn.Module):
    """A stage: the first or the second layer of a decoder with what lies before or behind it."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        self.first = stage == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from octavo.models.llama3 import rope_table

        cos, sin = rope_table(self.model.config, x.shape[1], x.device)
        x = self.model.tok_embeddings(x) if self.first else x
        x = self.model.layers[self.stage](x, cos, sin)
        return x if self.first else self.model.output(self.model.norm(x))


def pipeline_is_equal(recipe: str, make_batch: Any) -> None:
    """Two stages and two micro-batches: losses bit for bit, gradients to rounding, as without a pipeline."""
    rank = dist.get_rank()
    model = dense(recipe)
    stage = PipelineStage(Half(model, rank), rank, 2, torch.device("cpu"))

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_fn)
    inputs, targets = make_batch()
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    alone = dense(recipe)
    expected = []
    for part, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        loss = loss_fn(alone(part), wanted)
        (loss / 2).backward()
        expected.append(loss.detach())
    if rank == 1:
        assert torch.equal(torch.stack(losses), torch.stack(expected))
    mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    theirs = dict(alone.named_parameters())
    assert len(mine) == (10 if rank == 0 else 11)  # nine of a layer, the embedding, or the norm and the head
    for name, grad in mine.items():
        assert sqnr(grad, full(theirs[name].grad).double()) > 100, name
