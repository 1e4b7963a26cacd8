"""FSDP2 that gathers weights in 8 bits, where that changes no number.

FSDP2 gathers every weight twice a step. :func:`prepare_fsdp` lets it gather codes of one byte instead of two,
for weights whose format is the same for the weight and its transpose: one scale (tensorwise) or 128x128 blocks.
A rowwise weight has scales along N in the forward and along K in backward, which no set of codes serves; it is
gathered in the parameter dtype, and the report says so.

The scales are those of the whole weight: each rank takes the amax of its shard, block by block where blocks
straddle two shards, and one all-reduce over all weights joins them after the optimizer's step. Shards are rounded
to the parameter dtype of the mixed precision policy first, since that is what a layer would have quantized. So the
codes equal, bit for bit, those that a layer makes of a weight gathered in 16 bits.

The tensor subclass here carries FSDP2's two all-gather hooks and behaves like its data in all else; it never
reaches a state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from octavo.formats import ALL, Format
from octavo.quantize import reference
from octavo.training.gathered import GatheredWeight
from octavo.training.modules import Linear
from octavo.training.recipes import Recipe
from octavo.training.spanning import spanned

GATHERED = ("tensorwise", "128x128")
"""Granularities that are the same for a matrix and its transpose."""


@dataclass(frozen=True)
class GatherDecision:
    """How one weight is gathered: ``bits`` an element, and why not 8 where it is not."""

    name: str
    shape: tuple[int, ...]
    bits: int
    reason: str


@dataclass(frozen=True)
class GatherReport:
    """Every weight of a converted layer with what FSDP2 gathers of it; prints as a table."""

    decisions: tuple[GatherDecision, ...]

    @property
    def in_8_bits(self) -> tuple[str, ...]:
        """Names of the weights that are gathered as codes."""
        return tuple(d.name for d in self.decisions if d.bits == 8)

    def __str__(self) -> str:
        rows = [("weight", "shape", "bits", "reason")]
        rows += [(d.name, str(list(d.shape)), str(d.bits), d.reason) for d in self.decisions]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"{len(self.in_8_bits)} of {len(self.decisions)} gathered in 8 bits"])


def prepare_fsdp(model: nn.Module, *, skip: Callable[[str], bool] = lambda name: False) -> GatherReport:
    """Make FSDP2 gather the weights of converted layers in 8 bits where the recipe allows it.

    Call it after :func:`octavo.convert` (and after tensor parallelism) and before ``fully_shard``. Parameters
    keep names, shapes, dtypes and gradients; state dicts hold plain tensors as before.

    Args:
        model: with layers converted by Octavo.
        skip: weights, by name, to gather in the parameter dtype all the same.

    Returns:
        What is gathered in how many bits, and why.

    Raises:
        ValueError: if nothing was converted, or ``fully_shard`` was called already.
    """
    _check_order(model)
    scales, decisions, done = _Scales(), [], {}
    groups = dict(_common_scales(model))
    for prefix, module in model.named_modules():
        decisions += _prepare_module(module, prefix, scales, groups, skip, done)
    if not decisions:
        raise ValueError(
            "no layer of this model was converted: call octavo.convert before octavo.prepare_fsdp"
        )
    return GatherReport(tuple(decisions))


def prepare_module(module: nn.Module, path: str) -> tuple[GatherDecision, ...]:
    """:func:`prepare_fsdp` for a single layer called ``path``, where a framework shards layer by layer.

    All layers prepared so share one step for their scales; ``path`` must be unique in the process.
    """
    return tuple(_prepare_module(module, path, _process_scales, {}, lambda name: False, {}))


def _prepare_module(
    module: nn.Module,
    prefix: str,
    scales: _Scales,
    groups: dict[int, tuple[str, str | None]],
    skip: Callable[[str], bool],
    done: dict[int, nn.Parameter],
) -> Iterator[GatherDecision]:
    _watch_optimizers()
    for name in weight_names(module):
        full_name = f"{prefix}.{name}" if prefix else name
        weight, recipe = getattr(module, name), cast(Recipe, module.recipe)
        group, obstacle = groups.get(id(weight), (full_name, None))
        reason = "skipped" if skip(full_name) else obstacle or why_not_8_bits(recipe)
        bits = weight.element_size() * 8 if reason else 8
        yield GatherDecision(full_name, tuple(weight.shape), bits, reason or "codes and common scales")
        if reason:
            continue
        if id(weight) not in done:
            done[id(weight)] = _wrapped(weight, _Place(scales, full_name, group))
        setattr(module, name, done[id(weight)])
        _install_state_dict_hooks(module)


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Parameters of ``module`` that its recipe quantizes; a class of one's own names them in ``octavo_weights``."""
    if not isinstance(getattr(module, "recipe", None), Recipe):
        return ()
    return ("weight",) if isinstance(module, Linear) else tuple(getattr(module, "octavo_weights", ()))


def why_not_8_bits(recipe: Recipe) -> str | None:
    """Why a weight of this recipe is gathered in its parameter dtype, or None."""
    formats = {p.b for p in (recipe.output, recipe.grad_input) if p is not None}
    if not formats:
        return f"{recipe.name} keeps both products of the weight in high precision"
    if recipe.output is None or recipe.grad_input is None:
        return f"{recipe.name} needs the weight in high precision in one product"
    if len(formats) > 1 or next(iter(formats)).granularity not in GATHERED:
        kinds = " and ".join(sorted({f.granularity for f in formats}))
        return f"{kinds} scales of a weight and of its transpose differ"
    return None


def _check_order(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "octavo.prepare_fsdp came after fully_shard: call it before, once for the whole model"
        )


def _common_scales(model: nn.Module) -> Iterator[tuple[int, tuple[str, str | None]]]:
    """Weights that a layer quantizes joined together: (id, (group, why they are not gathered in 8 bits))."""
    for prefix, module in model.named_modules():
        names = spanned(module)
        if names is None:
            continue
        gate, up = (getattr(module, name) for name in names[:2])
        fmt = gate.recipe.output.b if gate.recipe.output else None
        obstacle = None
        if fmt is not None and fmt.block[0] != ALL and gate.weight.shape[0] % fmt.block[0]:
            obstacle = f"blocks of gate and up joined straddle the {gate.weight.shape[0]} rows of each"
        for layer in (gate, up):
            yield id(layer.weight), (f"{prefix}.gate_up", obstacle)


def _wrapped(weight: nn.Parameter, place: _Place) -> nn.Parameter:
    from torch.distributed.tensor import DTensor

    data = weight.detach()
    if isinstance(data, DTensor):
        local = ShardedWeight(data.to_local(), place)
        wrapped: torch.Tensor = _rewrapped(data, local)
    else:
        wrapped = ShardedWeight(data, place)
    result = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
    for key, value in vars(weight).items():
        setattr(result, key, value)
    return result


def _rewrapped(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """The DTensor ``tensor`` around another local tensor."""
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# ---- the scales of all weights ------------------------------------------------------------------------------


class _Writes:
    """How often weights may have been written without their versions telling."""

    count = 0
    watching = False


_writes = _Writes()


def weights_changed(*_: object) -> None:
    """Say that weights were written by something that PyTorch's version counters do not see.

    Optimizer steps and in-place operations are seen. ``torch._foreach_*`` on parameters outside an optimizer is
    not: on a DTensor it counts no version (PyTorch 2.11 to 2.14).
    """
    _writes.count += 1


def _watch_optimizers() -> None:
    # The foreach and fused optimizers write DTensors without counting a version.
    if not _writes.watching:
        register_optimizer_step_post_hook(weights_changed)
        _writes.watching = True


@dataclass(frozen=True, eq=False)
class _Place:
    """Which weight a shard belongs to."""

    scales: _Scales
    name: str
    group: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        # A copy of the model has scales of its own; all its weights must agree on them.
        scales = memo.setdefault(id(self.scales), _Scales())
        return _Place(scales, self.name, self.group)


@dataclass
class _Slot:
    """What is known of one weight: its shard, where that lies in the whole, and the amax of the whole."""

    shard: weakref.ref[ShardedWeight]
    parameter: weakref.ref[torch.Tensor]
    mesh: Any
    outer: torch.Size
    block: tuple[int, int]
    group: str
    stamp: tuple[int, ...] = ()
    amax: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def current_stamp(self) -> tuple[int, ...] | None:
        shard, parameter = self.shard(), self.parameter()
        if shard is None or parameter is None:
            return None
        versions = (shard.data_._version, shard._version, parameter._version)
        return (_writes.count, shard.data_.data_ptr(), *versions)


@dataclass(eq=False)
class _Scales:
    """The amax of every prepared weight, block by block; all that are stale are joined in one all-reduce."""

    slots: dict[str, _Slot] = field(default_factory=dict)

    def amax(self, shard: ShardedWeight, parameter: Any, mesh: Any, outer: torch.Size, fmt: Format) -> Any:
        """float32 ``fmt.scale_shape(outer)``: the largest magnitudes of the whole weight."""
        place = shard.place
        slot = self.slots.get(place.name)
        if (
            slot is None
            or slot.shard() is not shard
            or slot.parameter() is not parameter
            or slot.mesh is not mesh
        ):
            slot = _Slot(weakref.ref(shard), weakref.ref(parameter), mesh, outer, fmt.block, place.group)
            self.slots[place.name] = slot
        if slot.stamp != slot.current_stamp():
            self._refresh(mesh)
        partners = [s for s in self.slots.values() if s.group == slot.group and s.mesh is mesh]
        if len(partners) == 1 or fmt.block[0] != ALL:
            return slot.amax
        return torch.stack([s.amax for s in partners]).amax(0)

    def _refresh(self, mesh: Any) -> None:
        """Every rank comes here at the same gather, because all change their shards in the same steps."""
        stale = [
            slot
            for slot in self.slots.values()
            if slot.mesh is mesh and (stamp := slot.current_stamp()) is not None and stamp != slot.stamp
        ]
        tables = [_shard_amax(slot, slot.shard(), mesh) for slot in stale]
        joined = torch.cat([table.flatten() for table in tables])
        if mesh.size() > 1:
            # As integers: non-negative floats keep their order, and NaN counts as the largest.
            dist.all_reduce(joined.view(torch.int32), dist.ReduceOp.MAX, group=mesh.get_group())
        for slot, table, flat in zip(
            stale, tables, joined.split([table.numel() for table in tables]), strict=True
        ):
            slot.amax, slot.stamp = flat.view(table.shape), slot.current_stamp() or ()


_process_scales = _Scales()
"""For layers that are prepared one by one."""


@dataclass(frozen=True)
class _Extent:
    """Where a shard lies: rows ``start`` to ``start + length`` of dimension ``dim``."""

    dim: int
    start: int
    length: int
    padded: int

    @staticmethod
    def of(local: torch.Size, outer: torch.Size, mesh: Any) -> _Extent:
        """FSDP2 cuts one dimension into equal chunks, of which the last may be short or empty."""
        dim = next((d for d in range(len(outer)) if local[d] != outer[d]), 0)
        chunk = -(-outer[dim] // mesh.size())
        start = min(mesh.get_local_rank() * chunk, outer[dim])
        return _Extent(dim, start, local[dim], chunk)

    def blocks(self, ndim: int, block: tuple[int, int]) -> tuple[int, int, int]:
        """(first block, number of blocks, elements of the first block before the shard) along ``dim``."""
        extent = {ndim - 2: block[0], ndim - 1: block[1]}.get(self.dim, 1)
        if extent == ALL:
            return 0, 1, 0
        first, lead = divmod(self.start, extent)
        return first, -(-(lead + self.length) // extent), lead


def _shard_amax(slot: _Slot, shard: ShardedWeight | None, mesh: Any) -> torch.Tensor:
    """What this rank knows of the amax of every block of the whole weight; zero where it knows nothing."""
    assert shard is not None
    data, outer = shard.data_, slot.outer
    shape = [
        *outer[:-2],
        *(1 if b == ALL else -(-n // b) for n, b in zip(outer[-2:], slot.block, strict=True)),
    ]
    table = torch.zeros(shape, dtype=torch.float32, device=data.device)
    if data.numel():
        extent = _Extent.of(data.shape, outer, mesh)
        first, count, lead = extent.blocks(data.ndim, slot.block)
        if lead:
            # Zeros in front move the shard to its place within the first block.
            data = F.pad(data, (0, 0) * (data.ndim - 1 - extent.dim) + (lead, 0))
        table.narrow(extent.dim, first, count).copy_(reference.block_amax(data, slot.block))
    return table


def _codes(shard: torch.Tensor, encode: torch.Tensor, fmt: Format, extent: _Extent) -> torch.Tensor:
    """The codes of a shard padded to the size of the largest, as bytes."""
    padded = list(shard.shape)
    padded[extent.dim] = extent.padded
    if not shard.numel():
        return torch.zeros(padded, dtype=torch.uint8, device=shard.device)
    first, count, lead = extent.blocks(shard.ndim, fmt.block)
    region = list(shard.shape)
    region[extent.dim] += lead
    factors = reference.expand_blocks(encode.narrow(extent.dim, first, count), torch.Size(region), fmt.block)
    if lead:
        factors = factors.narrow(extent.dim, lead, extent.length)
    codes = reference.cast(shard.float() * factors, fmt.element).view(torch.uint8)
    missing = extent.padded - extent.length
    return F.pad(codes, (0, 0) * (codes.ndim - 1 - extent.dim) + (0, missing)) if missing else codes


# ---- the subclass -------------------------------------------------------------------------------------------

_KEEP = {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "clone", "detach", "empty_like", "new_zeros", "slice", "split", "view", "_to_copy",
        "_pin_memory",
    )
}  # fmt: skip
"""Ops by which FSDP2 and ``nn.Module`` make a shard, pad, move or copy it: what they give is a shard too."""


class ShardedWeight(torch.Tensor):
    """A weight, or a rank's shard of it, that FSDP2 gathers as 8-bit codes; in all else its plain data."""

    data_: torch.Tensor
    place: _Place

    @staticmethod
    def __new__(cls, data: torch.Tensor, place: _Place) -> ShardedWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=data.device, requires_grad=False,
        )  # fmt: skip
        self.data_, self.place = data, place
        return self

    def __init__(self, *args: Any) -> None:
        """Everything is done by ``__new__``."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardedWeight({self.data_!r})"

    def __tensor_flatten__(self) -> tuple[list[str], _Place]:
        return ["data_"], self.place

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], place: _Place, size: Any, stride: Any
    ) -> ShardedWeight:
        return ShardedWeight(inner["data_"], place)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place: list[_Place] = []

        def unwrap(x: ShardedWeight) -> torch.Tensor:
            place.append(x.place)
            return x.data_

        plain_args, plain_kwargs = pytree.tree_map_only(ShardedWeight, unwrap, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and isinstance(args[0], ShardedWeight) and isinstance(out, torch.Tensor):
            return args[0]
        if func.name().partition(".")[0] not in _KEEP:
            return out
        return pytree.tree_map_only(torch.Tensor, lambda x: ShardedWeight(x, place[0]), out)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], tuple[Any, ...]]:
        """The codes of this shard, and (scales of the whole, format, size of the whole)."""
        shard = self.data_ if mp_policy.param_dtype is None else self.data_.to(mp_policy.param_dtype)
        recipe: Recipe = module.recipe  # pyright: ignore[reportAssignmentType]
        product = recipe.product("output", shard.device)
        assert product is not None
        fmt = product.b
        parameter = _parameter_of(module, self)
        amax = self.place.scales.amax(self, parameter, mesh, outer_size, fmt)
        # Rounding keeps the order of numbers, so the largest of the rounded is the rounded largest.
        encode, scale = reference.float32_scales(amax.to(shard.dtype).float(), fmt)
        extent = _Extent.of(shard.shape, outer_size, mesh)
        return (_codes(shard, encode, fmt, extent),), (scale, fmt.key, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple[Any, ...],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[torch.Tensor, ...]] | None:
        """The gathered weight, made once; later gathers write its codes in place and give new scales."""
        scale, key, outer = metadata
        if out is not None:
            weight = getattr(out, "_local_tensor", out)
            assert isinstance(weight, GatheredWeight)
            weight.scale = scale
            return None
        fmt = Format.from_key(key)
        flat = all_gather_outputs[0].view(-1)[: outer.numel()]
        codes = flat.view(fmt.element.dtype).view(outer)
        return GatheredWeight(codes, scale, key, param_dtype, self.place.group), ()


def _parameter_of(module: nn.Module, shard: ShardedWeight) -> torch.Tensor:
    """The sharded parameter whose local tensor is ``shard``: its version counts what optimizers write."""
    for parameter in module.parameters(recurse=False):
        if getattr(parameter, "_local_tensor", None) is shard:
            return parameter
    return shard


# ---- state dicts --------------------------------------------------------------------------------------------


def _install_state_dict_hooks(module: nn.Module) -> None:
    if _unwrap_state not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_unwrap_state)
        module.register_load_state_dict_pre_hook(_wrap_state)


def _unwrap_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A state dict holds plain tensors, and DTensors of plain tensors, that share memory with the parameters."""
    for name in weight_names(module):
        value: Any = state_dict.get(prefix + name)
        if isinstance(value, ShardedWeight):
            state_dict[prefix + name] = value.data_
        elif isinstance(getattr(value, "_local_tensor", None), ShardedWeight):
            state_dict[prefix + name] = _rewrapped(value, value._local_tensor.data_)


def _wrap_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """With ``assign=True`` what is loaded becomes the parameter, and so must carry the hooks."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name in weight_names(module):
        value, current = state_dict.get(prefix + name), getattr(module, name)
        local = getattr(current, "_local_tensor", current)
        if value is None or not isinstance(local, ShardedWeight):
            continue
        inner = getattr(value, "_local_tensor", None)
        if inner is not None:
            state_dict[prefix + name] = _rewrapped(value, ShardedWeight(inner, local.place))
        else:
            state_dict[prefix + name] = ShardedWeight(value.detach(), local.place)
