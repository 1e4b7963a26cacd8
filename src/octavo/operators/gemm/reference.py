"""Products of quantized operands, defined: decode, multiply, add the bias, round once; layouts of scales."""

from __future__ import annotations

import torch

from octavo.formats import ScaledTensor
from octavo.quantize import reference as quantization

TILE_ROWS, TILE_CODES = 128, 4
"""Rows and codes of a tile of 512 swizzled scales."""


def swizzled_size(rows: int, codes: int) -> int:
    """Bytes of the swizzled scales of a matrix of so many rows and codes a row, padding included."""
    return -(-rows // TILE_ROWS) * -(-codes // TILE_CODES) * TILE_ROWS * TILE_CODES


def swizzle(codes: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Flat uint8 scales in the layout of ``SwizzleType.SWIZZLE_32_4_4`` from plain ones [rows, codes].

    Tiles of 128 rows by 4 codes follow each other along the contraction first; in a tile row r and code j lie at
    ``r % 32 * 16 + r // 32 * 4 + j`` (cuBLAS documentation, "1D block scaling factors layout").
    """
    rows, width = codes.shape
    tiles = (-(-rows // TILE_ROWS), -(-width // TILE_CODES))
    padded = codes.new_full((tiles[0] * TILE_ROWS, tiles[1] * TILE_CODES), padding, dtype=torch.uint8)
    padded[:rows, :width] = codes.view(torch.uint8)
    return padded.view(tiles[0], 4, 32, tiles[1], 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Plain e8m0 scales [rows, width] from flat swizzled ones."""
    tiles = (-(-rows // TILE_ROWS), -(-width // TILE_CODES))
    tiled = flat.reshape(-1).view(torch.uint8).view(tiles[0], tiles[1], 32, 4, 4)
    plain = tiled.permute(0, 3, 2, 1, 4).reshape(tiles[0] * TILE_ROWS, tiles[1] * TILE_CODES)
    return plain[:rows, :width].contiguous().view(torch.float8_e8m0fnu)


def decode(x: ScaledTensor) -> torch.Tensor:
    """float32 values."""
    return quantization.dequantize(x.data, x.scale, x.format, torch.float32)


def mixed_mm(x: torch.Tensor, weight: ScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x[M, K] @ weight[N, K].T + bias[N]``: 16-bit rows, a decoded weight, float32 sums, rounded once to x's dtype.

    The weight's values are rounded to float16 where x is float16, as a decoded weight would be.
    """
    values = decode(weight)
    if x.dtype == torch.float16 and weight.format.is_mx:
        values = values.half().float()
    out = x.float() @ values.T
    return (out if bias is None else out + bias.float()).to(x.dtype)
