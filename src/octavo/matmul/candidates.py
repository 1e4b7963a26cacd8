"""Launch configurations of products worth timing: what ``octavo tune`` tries beside the table."""

from __future__ import annotations

from octavo.matmul.launch_tables import Config


def _tiles(kind: str, *sizes: tuple[int, int, int, int, int], tma: bool = True) -> list[Config]:
    """Tiles (M, N, K, warps, stages)."""
    return [Config(kind, (m, n, k), warps, stages, tma=tma) for m, n, k, warps, stages in sizes]


_WIDE = (
    (128, 256, 128, 8, 3),
    (128, 256, 128, 8, 4),
    (128, 128, 128, 8, 4),
    (128, 128, 128, 4, 4),
    (256, 128, 128, 8, 3),
)
_BLOCK = (
    (128, 128, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (128, 128, 128, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 256, 128, 8, 3),
)

DENSE: dict[str, list[Config]] = {
    "dense epilogue": _tiles("epilogue", *_WIDE),
    "dense fast epilogue": _tiles("epilogue", *_WIDE),
    "dense block": _tiles("block", *_BLOCK),
    "dense blockrows": _tiles("block", *_BLOCK),
}
"""By the products of the tables, for any number of rows past the largest limit of the table."""

_PROMOTED = (
    (128, 128, 128, 8, 4),
    (128, 128, 128, 4, 3),
    (64, 256, 128, 8, 3),
    (64, 128, 128, 4, 4),
    (128, 128, 64, 8, 5),
)
"""Two float32 tiles are held where Hopper's sums are promoted, so no tile is wider."""

GROUPED: dict[str, list[Config]] = {
    "rows epilogue": _tiles("epilogue", *_PROMOTED),
    "rows fast epilogue": _tiles("epilogue", *_WIDE),
    "rows block": _tiles("block", *_BLOCK),
    "columns epilogue": _tiles("epilogue", *_PROMOTED),
    "columns fast epilogue": _tiles("epilogue", *_WIDE),
    "columns blockrows": _tiles("block", *_BLOCK),
}
"""The same for products of experts."""
