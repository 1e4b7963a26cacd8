"""Products of decoded and of 16-bit operands by the Triton kernels: allocation and launches."""

from __future__ import annotations

from typing import Any

import torch

from octavo import hardware
from octavo.formats import ScaledTensor, ScaleLayout
from octavo.launch import launch
from octavo.matmul import launch_tables, triton_kernels, triton_launch
from octavo.matmul.launch_tables import Config
from octavo.operators.gemm import kernels
from octavo.operators.gemm.plan import Plan, splits

_WORDS = {"e4m3fn": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1"}
_DECODE_TILE = (16, 256)
_SUM_COLUMNS = 1024


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _stored(x: ScaledTensor) -> torch.Tensor:
    data = x.data if x.data.stride(1) == 1 else x.data.contiguous()
    return data.view(torch.uint8) if x.format.element.packed == 2 else data


def _scales(x: ScaledTensor) -> torch.Tensor:
    """The scales without types that Triton lacks, contiguous along the contraction."""
    if x.layout is ScaleLayout.SWIZZLED_32_4_4:
        return x.scale.reshape(-1).view(torch.uint8)
    scale = x.scale if x.scale.stride(1) == 1 else x.scale.contiguous()
    return scale.view(torch.uint8) if x.format.is_mx else scale


def _read(x: torch.Tensor | ScaledTensor) -> tuple[torch.Tensor, torch.Tensor | None, ScaledTensor | None]:
    """(stored elements, scales if any, the operand if it is quantized), rows contiguous."""
    if isinstance(x, ScaledTensor):
        return _stored(x), _scales(x), x
    return (x if x.stride(1) == 1 else x.contiguous()), None, None


def _wide(x: torch.Tensor | ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return decode(x, dtype) if isinstance(x, ScaledTensor) else x


def _scale_stride(x: ScaledTensor | None, scale: torch.Tensor | None) -> int:
    """Elements from a row of scales to the next, or from 128 rows to the next where they are swizzled."""
    if x is None or scale is None:
        return 0
    if x.layout is ScaleLayout.SWIZZLED_32_4_4:
        return _cdiv(x.shape[1], 128) * 512
    return scale.stride(0)


def _side(name: str, x: ScaledTensor | None) -> dict[str, Any]:
    if x is None:
        found = ("plain", 1, "", False)
    else:
        swizzled = x.layout is ScaleLayout.SWIZZLED_32_4_4
        found = (
            "mx" if x.format.is_mx else "block", x.format.element.packed, _WORDS[x.format.element.name], swizzled,
        )  # fmt: skip
    return {f"{name}_{word}": value for word, value in zip(("KIND", "PACK", "FORMAT", "SWIZZLED"), found)}


def product(
    a: torch.Tensor | ScaledTensor,
    b: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    plan: Plan,
) -> torch.Tensor:
    """``out[M, N] = a[M, K] @ b[N, K].T + bias[N]``, written and returned; no extent is 0.

    Args:
        a: 16-bit values, or an MX operand.
        b: an MX operand, or beside 16-bit values one in 128 x 128 blocks or values of a's dtype.
        bias: of any floating type.
        out: rows contiguous.
    """
    arch = hardware.architecture(out.device)
    bias = None if bias is None else bias.contiguous()
    if plan.kind == "decode_first":
        wide = torch.bfloat16 if isinstance(a, ScaledTensor) else a.dtype
        return _multiply(_wide(a, wide), _wide(b, wide), bias, out)
    if plan.kind == "boxes":
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        config = Config(
            "plain", plan.tile, plan.warps, plan.stages, band=plan.band, split=plan.split, tma=True
        )
        return triton_launch.dense_mm(a, b, bias, out, config)
    (left, left_scale, scaled), (right, right_scale, narrow) = _read(a), _read(b)
    (m, n), k = out.shape, b.shape[1]
    block_m, block_n, block_k = plan.tile
    tiles = _cdiv(m, block_m) * _cdiv(n, block_n)
    table = launch_tables.load(arch)
    parts, steps = splits(plan, tiles, k, table.processors)
    partial = out[None] if parts == 1 else out.new_empty((parts, m, n), dtype=torch.float32)
    sides = {**_side("A", scaled), **_side("B", narrow)}
    words = ("KIND", "PACK", "FORMAT", "SWIZZLED")
    launch(
        kernels.gemm_decoding_tiles, (tiles, parts),
        (
            left, right, left_scale, right_scale, bias if parts == 1 else None, partial, m, n, k, steps,
            left.stride(0), right.stride(0),
            _scale_stride(scaled, left_scale), _scale_stride(narrow, right_scale), partial.stride(0), partial.stride(1),
        ),
        {
            **{f"{side}_{word}": sides[f"{side}_{word}"] for word in words for side in "AB"},
            "NATIVE": plan.kind == "native", "SWAP": plan.swap, "TRUNCATE": arch == "gfx942",
            "TAIL": k % block_k != 0, "BAND": plan.band, "DIES": table.dies,
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": plan.stages,
        },
        plan.warps,
    )  # fmt: skip
    if parts > 1:
        launch(
            triton_kernels.add_splits, (m, _cdiv(n, _SUM_COLUMNS)), (partial, bias, out, m, n, parts),
            {"BLOCK_N": _SUM_COLUMNS}, 4,
        )  # fmt: skip
    return out


def decode(x: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [M, K] of an operand in MX or in 128 x 128 blocks, in a 16-bit dtype."""
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    data, scale = _stored(x), _scales(x)
    block_m, block_k = _DECODE_TILE
    tiles_k = _cdiv(k, block_k)
    side = _side("", x)
    launch(
        kernels.gemm_decode_tiles, (_cdiv(rows, block_m) * tiles_k,),
        (data, scale, out, rows, k, tiles_k, data.stride(0), _scale_stride(x, scale)),
        {
            "KIND": side["_KIND"], "PACK": side["_PACK"], "SWIZZLED": side["_SWIZZLED"],
            "TRUNCATE": hardware.architecture(x.device) == "gfx942", "BLOCK_M": block_m, "BLOCK_K": block_k,
        },
        4,
    )  # fmt: skip
    return out


def _multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``a @ b.T + bias`` by PyTorch's product of 16-bit operands, rounded once."""
    if out.dtype == a.dtype and (bias is None or bias.dtype == a.dtype):
        return torch.mm(a, b.t(), out=out) if bias is None else torch.addmm(bias, a, b.t(), out=out)
    if a.is_cuda:
        wide = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:
        # Where Triton's interpreter serves CPU tensors, whose product has no output dtype of its own.
        wide = a.float() @ b.t().float()
    return out.copy_(wide if bias is None else wide + bias.float())
