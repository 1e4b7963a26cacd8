"""Converted linear layers on DTensors: column, row and sequence parallelism, in any combination of mesh dimensions.

A layer's placements follow from its weight's, mesh dimension by mesh dimension (x [..., K], weight [N, K]):

    weight      x needs                 output        gradients: x, weight
    Shard(0)    Replicate               Shard(-1)     Partial, Shard(0)      column parallel
    Shard(1)    Shard(-1)               Partial       Shard(-1), Shard(1)    row parallel
    Replicate   Replicate               Replicate     Replicate, Replicate
    Replicate   Shard(d), d not last    Shard(d)      Shard(d), Partial      data, sequence parallel

What x lacks is redistributed first, as ``F.linear`` on DTensors does. Then every rank multiplies its own shards by
the recipe: scales belong to shards, so that a rowwise activation is scaled within its shard of K in a row-parallel
layer, which is finer than on one device and not bit-equal to it. ``parallelize_module`` with PyTorch's
``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel`` works on converted layers as on any.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.training.autograd import Stats
from octavo.training.autograd import linear as local_linear
from octavo.training.recipes import Recipe


def is_dtensor(x: torch.Tensor | None) -> bool:
    """Whether ``x`` is a DTensor, without loading that part of PyTorch for those that are not."""
    if x is None or type(x) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, stats: Stats = None
) -> torch.Tensor:
    """:func:`octavo.training.autograd.linear` for plain tensors and for DTensors on one mesh.

    Raises:
        ValueError: if plain tensors and DTensors are mixed, or meshes differ.
    """
    operands = [t for t in (x, weight, bias) if t is not None]
    if not any(map(is_dtensor, operands)):
        return local_linear(x, weight, bias, recipe, stats)
    _check(operands)
    return _distributed(x, weight, bias, recipe, stats)


def _check(operands: list[torch.Tensor]) -> None:
    kinds = ["DTensor" if is_dtensor(t) else "Tensor" for t in operands]
    meshes = {t.device_mesh for t in operands if is_dtensor(t)}  # pyright: ignore[reportAttributeAccessIssue]
    if "Tensor" in kinds or len(meshes) > 1:
        raise ValueError(
            f"a linear layer got {kinds} for input, weight and bias on {len(meshes)} mesh(es): make all of them "
            "DTensors on one mesh (parallelize_module does) or none"
        )


def _distributed(x: Any, weight: Any, bias: Any, recipe: Recipe, stats: Stats) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    plain_weight = [Replicate() if p.is_partial() else p for p in weight.placements]
    if plain_weight != list(weight.placements):
        weight = weight.redistribute(placements=plain_weight)
    plan = [_placements(px, pw, x.ndim) for px, pw in zip(x.placements, weight.placements, strict=True)]
    needed, out, grad_x, grad_w, of_bias, grad_b = (list(column) for column in zip(*plan, strict=True))
    if needed != list(x.placements):
        x = x.redistribute(placements=needed)
    if bias is not None and of_bias != list(bias.placements):
        bias = bias.redistribute(placements=of_bias)
    local_bias = None
    if bias is not None:
        local_bias = bias.to_local(grad_placements=grad_b)
        if any(p.is_partial() for p in out):
            # Outputs are summed over these dimensions, and the bias belongs into the sum once.
            position = x.device_mesh.get_coordinate()
            first = all(i == 0 for i, p in zip(position, out, strict=True) if p.is_partial())
            local_bias = local_bias * float(first)
    result = local_linear(
        x.to_local(grad_placements=grad_x), weight.to_local(grad_placements=grad_w), local_bias, recipe, stats
    )
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    # Shards may be uneven, so the whole's size is told; its strides are those of a contiguous tensor.
    stride = tuple(torch.empty(shape, device="meta").stride())
    return DTensor.from_local(result, x.device_mesh, out, run_check=False, shape=shape, stride=stride)


def _placements(x: Any, weight: Any, ndim: int) -> tuple[Any, ...]:
    """Placements along one mesh dimension: (x needed, output, grad of x, grad of weight, bias, grad of bias)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = ndim - 1
    if weight.is_shard():
        if weight.dim in (0, -2):
            return Replicate(), Shard(last), Partial(), Shard(0), Shard(0), Shard(0)
        return Shard(last), Partial(), Shard(last), Shard(1), Replicate(), Partial()
    if x.is_shard() and x.dim % ndim != last:
        return x, x, x, Partial(), Replicate(), Partial()
    return (Replicate(),) * 6
