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

DENSE = (
    *((m, 4096, 4096) for m in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
    (4096, 4096, 8192),
    (8192, 8192, 8192),
    (32, 14336, 4096),
    (16, 28672, 4096),
    (4096, 256, 4096),
)
"""(M, N, K) of BF16 products of rows by a transposed weight: pytorch/pytorch pull request 190903."""

MX = (
    *((32, n, 4096) for n in (4096, 14336, 28672)),
    *((m, 4096, 4096) for m in (64, 128, 256, 512, 1024, 2048)),
    (4096, 256, 4096),
    *((4096, 4096, k) for k in (256, 512, 1024, 2048, 4096, 8192)),
    (8192, 8192, 8192),
)
"""(M, N, K) of MXFP8 and MXFP4 products: pytorch/pytorch pull request 196719."""

_UNIFORM = (
    (8, 512, 2048, 8192), (8, 1024, 8192, 8192), (8, 512, 4096, 4096), (16, 512, 4096, 4096), (4, 2048, 8192, 8192),
    (2, 2048, 4096, 4096), (8, 256, 8192, 8192), (4, 1024, 2048, 2048), (8, 512, 8192, 2048), (4, 512, 4096, 4096),
    (16, 256, 2048, 2048), (8, 128, 4096, 4096), (16, 128, 4096, 4096), (32, 64, 2048, 2048),
)  # fmt: skip
_RAGGED = (
    (1024, 512, 256, 128, 2048, 64, 512, 1024),
    (0, 1024, 0, 512, 2048, 128, 0, 896),
    (100, 333, 777, 1, 500, 63, 129, 250),
    (1, 3, 7, 15, 31, 63, 127, 255),
    (813, 1200, 47, 999, 512, 256, 88, 1600),
)
_KN = ((4096, 14336), (4096, 28672), (4096, 256), (8192, 8192), (14336, 4096))
GROUPED = (
    *(("uniform", (rows,) * groups, k, n) for groups, rows, k, n in _UNIFORM),
    *(("kn", (512,) * 8, k, n) for k, n in _KN),
    *(("ragged", sizes, 4096, 4096) for sizes in _RAGGED),
)
"""(suite, rows of each expert, K, N) of BF16 grouped products: pytorch/pytorch pull request 194032."""

EXPERTS = {
    "DeepSeek-MoE-16B": (49152, 2048, 1408, 64),
    "DeepSeek-V3 EP8": (65536, 7168, 2048, 32),
    "DeepSeek-V3 EP32": (32768, 7168, 2048, 8),
    "Llama4 16E": (16384, 5120, 8192, 16),
}
"""(rows, K, N, experts) of one rank: dimensions of the models' published configurations, K the model's width."""
