"""Launch configurations worth timing for each kind of quantization: what ``octavo tune`` tries beside the table.

A candidate is a piece of a launch table (:mod:`.launch_tables`) that replaces single entries. Candidates are data:
none of them decides anything before it was checked bit for bit and timed on the card in question. ``quads`` takes the
kernels of :mod:`.quad_kernels`; ``apart`` is explained at ``triton_launch.how_apart``.
"""

from __future__ import annotations

from octavo.quantize.launch_tables import Table

QUADS: tuple[tuple[int, int, int], ...] = (
    (128, 64, 4),
    (128, 64, 8),
    (128, 128, 8),
    (64, 64, 4),
    (128, 32, 4),
)
"""(rows, columns, warps) of tiles with a transposed output: 128 rows fill a line of 128 bytes."""


def tiles(bucket: str, *sizes: tuple[int, int, int], owned: int = 4, **more: int) -> list[Table]:
    """Tiles (rows, columns, warps) for one bucket of ``tiles``."""
    rest = {"group": 1, "evict": 0, "reverse": 1, "owned": owned, **more}
    return [{"tiles": {bucket: {"block_m": m, "block_k": k, "warps": w, **rest}}} for m, k, w in sizes]


def amax(bucket: str, *sizes: tuple[int, int, int, int, int]) -> list[Table]:
    """Tiles (rows, columns, warps, steps, owned) of the pass that finds whole maxima."""
    return [
        {"amax": {bucket: {"block_m": m, "block_k": k, "warps": w, "steps": s, "owned": r}}}
        for m, k, w, s, r in sizes
    ]


def rows(*options: tuple[int, int], source: str = "") -> list[Table]:
    """(rows, warps) of a program that holds whole rows of 4096 to 16384 elements."""
    lengths = (f"{source}{2**n}" for n in (12, 13, 14))
    buckets = list(lengths)
    return [{"rows": {bucket: {"rows": r, "warps": w} for bucket in buckets}} for r, w in options]


def rows_first(*options: tuple[int, int, int]) -> list[Table]:
    """(rows, warps, programs) of rowwise with the amax of the columns on the way."""
    found: list[Table] = [
        {"rows_first": {"any": {"enabled": 1, "rows": r, "warps": w, "programs": p}}} for r, w, p in options
    ]
    return [*found, {"rows_first": {"any": {"enabled": 0, "rows": 1, "warps": 8, "programs": 264}}}]


def _turned(bucket: str, *sizes: tuple[int, int, int], evict: int = 0) -> list[Table]:
    return tiles(bucket, *sizes, quads=1, evict=evict)


def _together(bucket: str, *sizes: tuple[int, int, int], same: bool = False) -> list[Table]:
    # One load, where the codes differ; two loads in one launch; and a launch each, by quads.
    found = [] if same else tiles(bucket, *sizes, quads=1)
    return [*found, *tiles(bucket, *sizes[:2], quads=1, apart=2)]


def _launches(bucket: str, turned: str, *sizes: tuple[int, int, int]) -> list[Table]:
    # Outputs of a launch each: the pair's entry says apart, the transposed one's says how.
    apart = tiles(bucket, (128, 64, 4), apart=1)[0]
    return [{"tiles": {**apart["tiles"], **one["tiles"]}} for one in _turned(turned, *sizes)]


DENSE: dict[str, list[Table]] = {
    "row": rows((1, 4), (1, 8), (2, 8)),
    "tensorwise": amax("one", (8, 1024, 8, 8, 1), (16, 512, 4, 2, 1)),
    "column^T": [*_turned("turned/rowwise", *QUADS), *_turned("turned/rowwise", (128, 64, 4), evict=1)],
    "tensorwise both": [*_together("both/tensorwise", (128, 64, 4), (64, 128, 4), same=True),
                        *_launches("both/tensorwise", "turned/tensorwise", *QUADS[:3])],
    "rowwise both": [*_turned("turned/rowwise", *QUADS[:3]), *rows_first((1, 8, 1056), (1, 4, 1056)),
                     *_together("both/rowwise", (128, 64, 4), (64, 128, 4))],
    "1x128": tiles("direct/1x128", (8, 1024, 8), (16, 512, 8), owned=1),
    "1x128^T": _turned("turned/1x128", *QUADS[:3], (128, 32, 4)),
    "1x128 both": [*_launches("both/1x128", "turned/1x128", *QUADS[:3]),
                   *_together("both/1x128", (128, 128, 8), (128, 128, 16))],
    "128x128": tiles("direct/128x128", (128, 128, 8), (128, 128, 16), owned=1),
    "128x128 both": [*_together("both/128x128", (128, 128, 8), (128, 128, 16), same=True),
                     *_launches("both/128x128", "turned/128x128", (128, 128, 8), (128, 128, 16))],
    "mxfp8": tiles("direct/1x32", (8, 1024, 8), (16, 512, 8), owned=1),
    "mxfp8^T": _turned("turned/1x32", *QUADS),
    "mxfp8 both": [*_together("both/1x32", (128, 64, 4), (64, 128, 4), (128, 128, 8)),
                   *_launches("both/1x32", "turned/1x32", *QUADS[:2])],
    "mxfp4": tiles("direct/e2m1:1x32", (16, 512, 4), (8, 1024, 8), (4, 1024, 4), owned=1),
    "mxfp4 both": tiles("both/e2m1:1x32", (32, 128, 4), (128, 64, 4), owned=8),
}  # fmt: skip
"""By the cases of the suite ``quantize``."""


def _backward(bucket: str, *sizes: tuple[int, int, int], owned: int = 4, apart: int = 0) -> list[Table]:
    return [
        {
            "swiglu_backward": {
                bucket: {"block_m": m, "block_k": k, "warps": w, "group": 1, "owned": owned, "apart": apart}
            }
        }
        for m, k, w in sizes
    ]


def _every_way(granularity: str, same: bool = False) -> list[Table]:
    bucket, sizes = f"tiles/{granularity}", ((64, 64, 4), (128, 64, 8))
    found = [] if same else _backward(bucket, *sizes) + _backward(bucket, *sizes, owned=2)
    return [
        *found,
        *(t for apart in (1, 2, 3) for t in _backward(bucket, *sizes[: 2 if apart == 2 else 1], apart=apart)),
    ]


FUSED: dict[str, list[Table]] = {
    "swiglu row": rows((1, 8), (1, 16), (1, 32), source="swiglu/"),
    "swiglu 1x128": tiles("direct/1x128", (8, 1024, 8), owned=1),
    "swiglu back tensorwise": _every_way("tensorwise", same=True),
    "swiglu back row": _every_way("rowwise"),
    "swiglu back 1x128": _every_way("1x128"),
    "swiglu back mxfp8": _every_way("1x32"),
}
"""By the cases of the fused producers."""


def grouped(bucket: str, *sizes: tuple[int, int, int], owned: int = 4) -> list[Table]:
    """Tiles of quantization by groups."""
    return [
        {"grouped": {bucket: {"block_m": m, "block_k": k, "warps": w, "owned": owned}}} for m, k, w in sizes
    ]


GROUPED: dict[str, list[Table]] = {
    "groups row^T": [
        *grouped("columns/rowwise", (128, 64, 4), (64, 64, 4), (128, 128, 8)),
        *grouped("columns/rowwise", (128, 64, 4), (128, 64, 8), owned=8),
        *grouped("amax", (128, 64, 8), (256, 64, 4), (256, 128, 8), owned=8),
        *grouped("amax", (256, 64, 8), owned=1),
    ],
    "groups 1x128^T": grouped("columns/1x128", (128, 64, 4), (128, 32, 4), (128, 64, 8)),
    "groups mxfp8^T": grouped("columns/1x32", (128, 64, 4), (64, 64, 4), (128, 64, 8)),
}
"""By the cases of ragged groups."""
