"""Launches of the kernels that write zeros over what grouped products of PyTorch's leave."""

from __future__ import annotations

import torch

from octavo.launch import launch
from octavo.matmul import zero_kernels

BLOCK_M, BLOCK_N = 16, 512
BLOCK, STEPS = 4096, 16
WARPS = 4


def zero_tail(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``out`` [M, N], contiguous, with zeros in the rows past the last of the group ends ``offs`` int32 [G]."""
    rows, columns = out.shape
    if out.numel():
        launch(
            zero_kernels.zero_rows_past, (-(-rows // BLOCK_M),),
            (out, offs.contiguous(), rows, columns, offs.shape[0]),
            {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}, WARPS,
        )  # fmt: skip
    return out


def zero_empty_groups(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``out`` [G, N, K], contiguous, with zeros in the matrices of groups without rows."""
    size = out.shape[1] * out.shape[2]
    if out.numel():
        tiles = -(-size // (BLOCK * STEPS))
        launch(
            zero_kernels.zero_empty_groups, (out.shape[0] * tiles,), (out, offs.contiguous(), size, tiles),
            {"STEPS": STEPS, "BLOCK": BLOCK}, WARPS,
        )  # fmt: skip
    return out
