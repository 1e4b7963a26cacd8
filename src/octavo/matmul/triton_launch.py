"""Launches of the Triton matrix products: which kind of kernel two formats need, with which tiles and grid.

Grids depend on sizes that the host knows: for rows by expert the grid is the most tiles that any group sizes can
need, and programs without work end at once. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo import hardware
from octavo.formats import ALL, Format, ScaledTensor
from octavo.matmul import launch_tables, triton_kernels
from octavo.matmul.launch_tables import Config

_WORDS = {"e4m3fn": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1"}
_TMA_ALIGNMENT = 16
# Type checkers do not know what a @triton.jit function takes.
_KERNELS: Any = triton_kernels


@dataclass(frozen=True)
class Operand:
    """One side of a product as the kernels see it: data and scale without narrow types Triton lacks, strides
    of the scale by group, row and block (0 along a whole dimension)."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    fmt: Format | None = None

    @property
    def pack(self) -> int:
        return 1 if self.fmt is None else self.fmt.element.packed

    @property
    def size(self) -> int:
        """Elements along the contraction."""
        return self.data.shape[-1] * self.pack

    @property
    def scale_strides(self) -> tuple[int, int, int]:
        if self.fmt is None or self.scale is None:
            return 0, 0, 0
        rows, cols = self.fmt.block
        group = self.scale.stride(0) if self.scale.ndim == 3 else 0
        return group, 0 if rows == ALL else self.scale.stride(-2), 0 if cols == ALL else self.scale.stride(-1)


def operand(x: ScaledTensor) -> Operand:
    """``x`` for the kernels, contraction contiguous."""
    data = x.data if x.data.stride(-1) == 1 else x.data.contiguous()
    if x.format.element.packed > 1:
        data = data.view(torch.uint8)
    return Operand(data, x.scale.view(torch.uint8) if x.format.is_mx else x.scale, x.format)


def work_of(a: Format | None, b: Format | None) -> str:
    """The kind of work that the tables distinguish, by the operands' formats (None for no scales)."""
    if a is None or b is None:
        return "plain"
    if a.is_mx:
        packs = {a.element.packed, b.element.packed}
        return "mxfp8" if packs == {1} else "mxfp4" if packs == {2} else "mxmixed"
    if a.granularity == b.granularity == "1x128":
        return "blockrows"
    return "block" if any(fmt.block[1] != ALL for fmt in (a, b)) else "epilogue"


def constants(
    a: Format | None, b: Format | None, config: Config, arch: str, *, tail: bool, tma: bool, fast_accum: bool
) -> dict[str, Any]:
    """The compile-time parameters that the three kernels share."""
    kind, (block_m, block_n, block_k) = config.kind, config.tile
    promote = kind == "epilogue" and not fast_accum and arch.startswith("sm_")
    return {
        "KIND": kind, "TAIL": tail, "TMA": tma, "PRECISION": "ieee",
        "PROMOTE": min(config.promote, block_k) if promote else 0,
        "TRUNCATE": arch == "gfx942", "E8M0": kind == "block" and a is not None and a.is_mx,
        "HALVES": arch.startswith("sm_") and block_n > 128, "BAND": config.band, "DIES": launch_tables.load(arch).dies,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
        **_side("A", a, block_m), **_side("B", b, block_n),
    }  # fmt: skip


def _side(name: str, fmt: Format | None, block: int) -> dict[str, Any]:
    rows = 1 if fmt is None else fmt.block[0]
    # A tile starts at a multiple of its size, so that a block of rows at least as large covers it; rows of a
    # in groups start anywhere, and never have such blocks.
    one = rows == ALL or (name == "B" and rows > 1 and rows % block == 0)
    return {
        f"{name}_PACK": 1 if fmt is None else fmt.element.packed,
        f"{name}_FORMAT": "" if fmt is None else _WORDS.get(fmt.element.name, ""),
        f"{name}_DIV": max(rows, 1),
        f"{name}_ONE": one,
    }


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Launch on the tensor's device, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        yield
    else:
        with torch.cuda.device(device):
            yield


def _boxes(a: Operand, b: Operand, config: Config, arch: str) -> tuple[Any, Any]:
    """Tensor descriptors of both operands, or (None, None) where the accelerator cannot address them."""
    if not config.tma or arch.startswith("gfx"):
        return None, None
    matrices = [
        x.data.flatten(0, 1) if x.data.ndim == 3 and x.data.is_contiguous() else x.data for x in (a, b)
    ]
    if not all(_fits_box(x) for x in matrices):
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_m, block_n, block_k = config.tile
    boxes = [[block_m, block_k // a.pack], [block_n, block_k // b.pack]]
    first, second = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), box)
        for x, box in zip(matrices, boxes, strict=True)
    )
    return first, second


def _fits_box(x: torch.Tensor) -> bool:
    aligned = x.data_ptr() % _TMA_ALIGNMENT == 0 and x.stride(0) * x.element_size() % _TMA_ALIGNMENT == 0
    return x.ndim == 2 and x.stride(1) == 1 and aligned and x.numel() > 0


def _backend(config: Config, arch: str) -> dict[str, Any]:
    options = dict(config.options) if arch.startswith("gfx") else {}
    return {"num_warps": config.warps, "num_stages": config.stages, **options}


def _lookup(arch: str, form: str, work: str, rows: int, fast_accum: bool) -> Config:
    fast = [f"{form} fast {work}"] if fast_accum else []
    return launch_tables.lookup(arch, rows, *fast, f"{form} {work}")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ---- dense --------------------------------------------------------------------------------------------------


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """Kernel of ``octavo::scaled_mm``."""
    left, right = operand(a), operand(b)
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    arch = hardware.architecture(a.device)
    config = _lookup(arch, "dense", work_of(a.format, b.format), m, fast_accum)
    bias = None if bias is None else bias.contiguous()
    with _on(a.device):
        if config.kind == "decode_first":
            return _dense_decoded(decode_mx(a), decode_mx(b), bias, out)
        return _dense(left, right, bias, out, k, config, arch, fast_accum)


def splits_of(config: Config, tiles: int, k: int, processors: int) -> tuple[int, int]:
    """(parts, tiles a part) that the contraction is split into: up to two programs a processor, four tiles each."""
    steps = max(1, _cdiv(k, config.tile[2]))
    wanted = min(config.split, max(1, 2 * processors // tiles), max(1, steps // 4))
    each = _cdiv(steps, wanted)
    return _cdiv(steps, each), each


def _dense(
    a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor, k: int, config: Config, arch: str,
    fast_accum: bool,
) -> torch.Tensor:  # fmt: skip
    (m, n), (block_m, block_n, block_k) = out.shape, config.tile
    tiles = _cdiv(m, block_m) * _cdiv(n, block_n)
    splits, split_steps = splits_of(config, tiles, k, launch_tables.load(arch).processors)
    parts = out[None] if splits == 1 else out.new_empty((splits, m, n), dtype=torch.float32)
    a_box, b_box = _boxes(a, b, config, arch)
    _KERNELS.scaled_mm_tiles[(tiles, splits)](
        a.data, b.data, a.scale, b.scale, bias if splits == 1 else None, parts, a_box, b_box,
        m, n, k, split_steps, *a.data.stride(), *b.data.stride(), *a.scale_strides[1:], *b.scale_strides[1:],
        parts.stride(0), n,
        **constants(
            a.fmt, b.fmt, config, arch, tail=k % block_k != 0, tma=a_box is not None, fast_accum=fast_accum
        ),
        **_backend(config, arch),
    )  # fmt: skip
    if splits > 1:
        block = 1024
        _KERNELS.add_splits[(m, _cdiv(n, block))](parts, bias, out, m, n, splits, BLOCK_N=block, num_warps=4)
    return out


def dense_mm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, config: Config
) -> torch.Tensor:
    """``out[M, N] = a[M, K] @ b[N, K].T + bias[N]`` of 16-bit operands; no extent is 0, out's rows are contiguous."""
    with _on(out.device):
        return _dense(
            Operand(a), Operand(b), bias, out, a.shape[1], config, hardware.architecture(out.device), False
        )


def decode_mx(x: ScaledTensor) -> torch.Tensor:
    """An MX tensor [..., K] in bfloat16: exact wherever the values are normal numbers of bfloat16."""
    side = operand(x)
    data = side.data.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    k = x.shape[-1]
    rows = out.numel() // max(k, 1)
    if rows and k:
        assert side.scale is not None
        block_m, block_k = 16, 256
        tiles_k = _cdiv(k, block_k)
        _KERNELS.decode_mx_tiles[(_cdiv(rows, block_m) * tiles_k,)](
            data, side.scale.contiguous(), out, rows, k, tiles_k, PACK=side.pack,
            TRUNCATE=hardware.architecture(x.device) == "gfx942", BLOCK_M=block_m, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
    return out


def _dense_decoded(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if out.dtype == torch.bfloat16:
        return torch.mm(a, b.t()) if bias is None else torch.addmm(bias, a, b.t())
    if a.is_cuda:
        wide = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:
        # Where Triton's interpreter serves CPU tensors, whose product has no output dtype of its own.
        wide = a.float() @ b.t().float()
    return out.copy_(wide if bias is None else wide + bias.float())


# ---- grouped ------------------------------------------------------------------------------------------------


def scaled_grouped_mm(
    a: ScaledTensor, b: ScaledTensor, offs: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:  # fmt: skip
    """Kernel of ``octavo::scaled_grouped_mm``, both forms."""
    work = work_of(a.format, b.format)
    if b.ndim == 2:
        return _columns(operand(a), operand(b), offs, out_dtype, work, fast_accum)
    return _rows(operand(a), operand(b), offs, bias, out_dtype, work, fast_accum)


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Kernel of ``octavo::grouped_mm``, both forms, any strides."""
    work = "wide" if a.dtype == torch.float32 else "plain"
    if b.ndim == 2:
        return _columns(Operand(a), Operand(b), offs, a.dtype, work, False)
    return _rows(Operand(a), Operand(b), offs, bias, a.dtype, work, False)


def _power_above(size: int) -> int:
    """The smallest power of two above ``size``."""
    return 1 << size.bit_length()


def _rows(
    a: Operand, b: Operand, offs: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, work: str,
    fast_accum: bool,
) -> torch.Tensor:  # fmt: skip
    (m, _), (groups, n, _), k = a.data.shape, b.data.shape, a.size
    out = torch.empty((m, n), dtype=out_dtype, device=a.data.device)
    if m == 0 or n == 0:
        return out
    arch = hardware.architecture(out.device)
    config = _lookup(arch, "rows", work, m // groups, fast_accum)
    block_m, block_n, block_k = config.tile
    # Each group, and the tail past the last one, can add one tile that is not full.
    tiles_m = (m + (groups + 1) * (block_m - 1)) // block_m
    with _on(out.device):
        a_box, b_box = _boxes(a, b, config, arch)
        _KERNELS.grouped_rows_tiles[(tiles_m * _cdiv(n, block_n),)](
            a.data, b.data, a.scale, b.scale, None if bias is None else bias.contiguous(), out, offs.contiguous(),
            a_box, b_box, m, n, k, groups, tiles_m,
            *a.data.stride(), *b.data.stride(), *a.scale_strides[1:], *b.scale_strides, n,
            GROUPS=_power_above(groups),
            **constants(
                a.fmt, b.fmt, config, arch, tail=k % block_k != 0, tma=a_box is not None, fast_accum=fast_accum
            ),
            **_backend(config, arch),
        )  # fmt: skip
    return out


def _columns(
    a: Operand, b: Operand, offs: torch.Tensor, out_dtype: torch.dtype, work: str, fast_accum: bool
) -> torch.Tensor:
    m, n, groups = a.data.shape[0], b.data.shape[0], offs.shape[0]
    out = torch.empty((groups, m, n), dtype=out_dtype, device=a.data.device)
    if m == 0 or n == 0:
        return out
    arch = hardware.architecture(out.device)
    config = _lookup(arch, "columns", work, m, fast_accum)
    block_m, block_n, block_k = config.tile
    # Groups start and end at multiples of the scale's block.
    aligned = config.kind == "block" and any(x.fmt is not None and x.fmt.block[1] == block_k for x in (a, b))
    with _on(out.device):
        a_box, b_box = _boxes(a, b, config, arch)
        _KERNELS.grouped_columns_tiles[(groups * _cdiv(m, block_m) * _cdiv(n, block_n),)](
            a.data, b.data, a.scale, b.scale, out, offs.contiguous(), a_box, b_box,
            m, n, *a.data.stride(), *b.data.stride(), *a.scale_strides, *b.scale_strides,
            **constants(
                a.fmt, b.fmt, config, arch, tail=not aligned, tma=a_box is not None, fast_accum=fast_accum
            ),
            **_backend(config, arch),
        )  # fmt: skip
    return out
