"""Published operator cases (shapes only), measured by others on one AMD Instinct MI355X: run here side by side.

RMSNorm forward: pytorch/pytorch pull request 191447; TopK small k: 193548; TopK radix: the same author's series.
"""

from __future__ import annotations

RMS_NORM = (
    *(("fp16", m, n) for m, n in ((8192, 4096), (4096, 8192), (2048, 16384), (2048, 65536), (2048, 114688))),
    *(("fp16", m, n) for m, n in ((8192, 4097), (4096, 8193), (2048, 16385))),
    *(("bf16", m, n) for m, n in ((8192, 4096), (2048, 16384), (8192, 4097), (2048, 16385))),
    *(("fp32", m, n) for m, n in ((8192, 4096), (4096, 8192), (2048, 16384), (2048, 32768), (2048, 65536))),
    *(("fp32", m, n) for m, n in ((2048, 114688), (8192, 4097), (4096, 8193), (2048, 16385), (2048, 32769))),
)
"""(dtype, rows, columns)."""

TOPK_SMALL_K = (
    (256, 1024, 8),
    (256, 8192, 16),
    (4096, 1024, 8),
    (4096, 2048, 2),
    (4096, 4096, 8),
    (4096, 8192, 16),
    (16384, 1024, 2),
    (16384, 1024, 8),
    (16384, 4096, 8),
    (16384, 8192, 2),
)
"""(rows, columns, k), float32."""

TOPK_RADIX = (
    *((m, 8192, 64) for m in (256, 2048, 4096)),
    *((m, 32768, 256) for m in (256, 2048, 4096)),
    *((m, 16384, 257) for m in (256, 2048, 4096)),
    *((m, 32768, 350) for m in (256, 2048, 4096)),
    *((m, 32768, 390) for m in (256, 2048, 4096)),
    *((m, 131072, 768) for m in (256, 2048, 4096)),
    *((m, 32768, 833) for m in (256, 2048, 4096)),
    *((m, 262144, 1024) for m in (256, 2048)),
)
"""(rows, columns, k), float32."""
