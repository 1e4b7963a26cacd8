"""``torch.topk`` on Octavo's kernels: what they are right for, and the call itself.

NaN ranks above everything whatever its sign, -0 equals +0, and equal values go by the lowest index, so a result is
the same in every run, with deterministic algorithms on or off. ``sorted=False`` may still return sorted results.
"""

from __future__ import annotations

import functools

import torch

from octavo import hardware
from octavo.launch import Cache
from octavo.operators import wins
from octavo.operators.override import Filter, Override, is_copy_on_write
from octavo.operators.topk import plan as plans

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_COLUMNS = 2**31 - 2**20 - 1

OTHER_DTYPE = "dtype is not float32, bfloat16 or float16"
TOO_LONG = "rows of 2**31 columns or more"
K_TOO_LARGE = f"k is above {plans.MAX_K}"


def _why_not_arguments(self: torch.Tensor, k: int, dim: int) -> str | None:
    if self.dtype not in DTYPES:
        return OTHER_DTYPE
    if self.layout is not torch.strided:
        return "the tensor is not strided"
    if self.ndim == 0 or not -self.ndim <= dim < self.ndim:
        return "no such dimension, or none at all"
    n = self.shape[dim]
    if not 0 < k <= n:
        return "k is 0 or out of range"
    if k > plans.MAX_K:
        return K_TOO_LARGE
    if self.numel() == 0:
        return "the tensor is empty"
    if n > MAX_COLUMNS:
        return TOO_LONG
    if is_copy_on_write(self):
        return "the tensor is copy-on-write"
    return None


def why_not(
    self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> str | None:
    """Why Octavo's kernels are not right for these arguments of ``aten::topk``, or None if they are."""
    return _why_not_arguments(self, k, dim) or hardware.why_no_triton(self.device)


def why_not_out(
    self: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> str | None:
    """As ``why_not``, for ``aten::topk.values``: the outputs must be as PyTorch would allocate them."""
    reason = _why_not_arguments(self, k, dim)
    if reason is not None:
        return reason
    shape = list(self.shape)
    shape[dim] = k
    for out, dtype in ((values, self.dtype), (indices, torch.int64)):
        if out.device != self.device or out.dtype != dtype:
            return "an out= tensor has another device or dtype"
        if list(out.shape) != shape or not out.is_contiguous():
            return "an out= tensor has another shape or is not contiguous"
        if is_copy_on_write(out):
            return "an out= tensor is copy-on-write"
        if out.untyped_storage().data_ptr() == self.untyped_storage().data_ptr():
            return "an out= tensor may overlap the input"
    return hardware.why_no_triton(self.device)


def measured(self: torch.Tensor, k: int, dim: int = -1, *_: object, **__: object) -> str | None:
    """Why no measurement says that these arguments win, or None if one does."""
    n = self.shape[dim]
    if dim not in (-1, self.ndim - 1) or self.stride(-1) != 1:
        return wins.OTHER_DIMENSION
    return wins.why_not("topk", self.device, dtype=str(self.dtype)[6:], m=self.numel() // n, n=n, k=k)


@functools.cache
def _programs(index: int) -> int:
    return 2 * torch.cuda.get_device_properties(index).multi_processor_count


def _plan(x: torch.Tensor, k: int) -> plans.Plan:
    programs = 264 if x.device.type != "cuda" else _programs(x.device.index)
    return plans.choose(x.shape[0], x.shape[1], k, x.element_size(), programs)


_prepared = Cache()


def topk(
    self: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    values: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    plan: plans.Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.topk`` for arguments that ``why_not`` accepts; ``plan`` overrides the choice of kernel."""
    last = dim in (-1, self.ndim - 1)
    x = self if last else self.movedim(dim, -1)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], k)
    direct = last and values is not None and indices is not None
    out_values = values if direct else x.new_empty(shape)
    out_indices = indices if direct else x.new_empty(shape, dtype=torch.int64)
    assert out_values is not None
    assert out_indices is not None
    key = (rows.shape, rows.stride(), rows.dtype, rows.device, k, largest, sorted, plan)
    run = _prepared.get(key)
    if run is None:
        from octavo.operators.topk.launch import prepare

        run = _prepared[key] = prepare(rows, k, largest, sorted, plan or _plan(rows, k))
    run(rows, out_values, out_indices)
    if last:
        return out_values, out_indices
    out_values, out_indices = out_values.movedim(-1, dim), out_indices.movedim(-1, dim)
    if values is None or indices is None:
        return out_values.contiguous(), out_indices.contiguous()
    return values.copy_(out_values), indices.copy_(out_indices)


_FILTER = Filter(
    operator="topk",
    tensor=0,
    columns=2,
    dtypes=DTYPES,
    max_columns=MAX_COLUMNS,
    other_dtype=OTHER_DTYPE,
    too_long=TOO_LONG,
    k=1,
    max_k=plans.MAX_K,
    k_too_large=K_TOO_LARGE,
)

OVERRIDES = (
    Override("aten::topk", why_not, measured, topk, _FILTER),
    Override("aten::topk.values", why_not_out, measured, topk, _FILTER),
)
