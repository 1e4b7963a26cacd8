"""Which shape is launched how: plain arithmetic, shared by kernels, gates and launches; imports no FlyDSL."""

from __future__ import annotations

WAVE = 64
MAX_COLUMNS = 8192
"""Longest row of RMSNorm that a workgroup holds in registers, 32 values a lane."""


def vector_width(columns: int) -> int:
    """Values of 16 bits in one load: the largest power of two up to 8 that divides the row length."""
    return min(8, columns & -columns)


def rms_norm_threads(columns: int) -> int:
    """Threads a row: one wave up to 1024 columns, then as many as keep at most 32 values a lane."""
    return 64 if columns <= 1024 else 128 if columns <= 2048 else 256


MM_TILE = 128
"""Rows and columns of the result that a workgroup of the dense product makes."""
MM_K = 64
"""Values along K that it holds in LDS at a time."""
MX_K, MX_BLOCK = 128, 32
"""Values along K of an MX product held in LDS at a time, and those that share a scale."""
MX_ELEMENTS = {"e4m3fn": 0, "e5m2": 1}
"""Element of an MX product to its code in the matrix instruction (cbsz, blgp)."""
