"""Launches of the Triton quantization kernels: how many passes a pair of formats needs, and with which grids.

Blocks that lie within a tile take one read of x. A block that is a whole dimension needs its amax first: one
pass more, except for plain rowwise, whose rows a program holds. The second pass walks backwards, to find in
the cache what the first one read last.

Strides: where x is a transposed view, the roles of the two outputs are exchanged and the tensor is read as it
lies. Any other strides are read as they are, too; a copy is made only of more than one leading dimension that
no single stride can walk.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from octavo import hardware
from octavo.formats import ALL, Format
from octavo.launch import launch
from octavo.quantize import grouped as padded_groups
from octavo.quantize import grouped_kernels, launch_tables, quad_kernels, triton_kernels

MAX_WHOLE_ROW = 32768
"""Longest row that one program holds in registers; longer ones are read twice."""

MAX_PARTIALS = 1024
"""Programs of the amax pass of one whole matrix: each leaves a partial, and the next pass reads them all."""

_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

# What the hardware's conversions do by themselves (see numerics_kernels.to_codes); other elements are
# converted by integer arithmetic, as all are on gfx950 before Triton 3.9, which leaves its instruction unused.
_CASTS = {
    "sm_90": {"e4m3fn": "saturates", "e5m2": "saturates"},
    "gfx942": {"e4m3fnuz": "rounds", "e5m2fnuz": "rounds"},
    "gfx950": {"e4m3fn": "rounds", "e5m2": "rounds"} if _TRITON >= (3, 9) else {},
}

Pair = tuple[torch.Tensor, torch.Tensor]
_NOTHING: Pair = (torch.empty(0), torch.empty(0))


@dataclass(frozen=True)
class Output:
    """One output of a pass over x [B, M, K]; ``block`` counts rows and columns of x."""

    fmt: Format
    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]


_ABSENT: dict[str, str | int] = {"ELEMENT": "", "ROUNDING": "", "CAST": "", "RB": 1, "CB": 1}


def quantize(x: torch.Tensor, fmt: Format, transpose: bool) -> Pair:
    """Kernel of ``octavo::quantize``."""
    return quantize_optional(x, None, fmt)[1] if transpose else quantize_optional(x, fmt, None)[0]


def quantize_both(
    x: torch.Tensor, fmt: Format, transposed_fmt: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kernel of ``octavo::quantize_both``."""
    direct, turned = quantize_optional(x, fmt, transposed_fmt)
    return *direct, *turned


def quantize_groups(x: torch.Tensor, offs: torch.Tensor, fmt: Format, transpose: bool, align: int) -> Pair:
    """Kernel of ``octavo::quantize_groups``; the group ends stay on the device."""
    rows, cols = x.shape
    with on_device(x.device):
        if not transpose:
            data, scale = _empty(x, (rows, cols)), x.new_empty((rows, 1), dtype=torch.float32)
            _group_rows(x, offs, fmt, data, scale)
        else:
            capacity = padded_groups.capacity(rows, offs.shape[0], align)
            data = _empty(x, fmt.data_shape((cols, capacity)))
            shape = fmt.scale_shape((cols, capacity))
            if fmt.block[1] == ALL:
                shape = (offs.shape[0], *shape)
            scale = _empty_scale(x, shape, fmt)
            _group_columns(x, offs, fmt, align, capacity, data, scale)
    return typed(data, scale, fmt)


def quantize_optional(x: torch.Tensor, fmt: Format | None, turned_fmt: Format | None) -> tuple[Pair, Pair]:
    """(data, scale) of x [..., M, K] and of its transpose; a pair of empty tensors for each absent format."""
    batch = x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    lead = x.shape[:-2]
    direct, turned = outputs(x, batch.shape, fmt, turned_fmt)
    if batch.shape[0]:
        with on_device(x.device):
            if batch.stride(-1) != 1 and batch.stride(-2) == 1:
                launch_passes(batch.mT, _transposed(turned), _transposed(direct))
            else:
                launch_passes(batch, direct, turned)
    return _result(direct, lead), _result(turned, lead)


def outputs(
    like: torch.Tensor, shape: torch.Size, fmt: Format | None, turned_fmt: Format | None
) -> tuple[Output | None, Output | None]:
    """Memory for a tensor of ``shape`` [B, M, K] and for its transpose on the device of ``like``."""
    direct = None if fmt is None else _output(like, shape, fmt, fmt.block)
    if turned_fmt is None:
        return direct, None
    turned = torch.Size((shape[0], shape[2], shape[1]))
    return direct, _output(like, turned, turned_fmt, (turned_fmt.block[1], turned_fmt.block[0]))


def _output(x: torch.Tensor, shape: torch.Size, fmt: Format, block: tuple[int, int]) -> Output:
    return Output(fmt, _empty(x, fmt.data_shape(shape)), _empty_scale(x, fmt.scale_shape(shape), fmt), block)


def _transposed(output: Output | None) -> Output | None:
    return (
        None
        if output is None
        else Output(output.fmt, output.data, output.scale, (output.block[1], output.block[0]))
    )


def _empty(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # Bytes, typed at the end: PyTorch cannot fill some narrow types in deterministic mode, nor Triton take them.
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _empty_scale(x: torch.Tensor, shape: tuple[int, ...], fmt: Format) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8 if fmt.is_mx else torch.float32, device=x.device)


def typed(data: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Pair:
    """The bytes of ``fmt`` in its own dtypes."""
    return data.view(fmt.element.dtype), scale.view(fmt.scale_dtype)


def _result(output: Output | None, lead: torch.Size) -> Pair:
    if output is None:
        return _NOTHING
    data, scale = typed(output.data, output.scale, output.fmt)
    if len(lead) != 1:
        data, scale = data.view(*lead, *data.shape[-2:]), scale.view(*lead, *scale.shape[-2:])
    return data, scale


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Launch on the tensor's device, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        yield
    else:
        with torch.cuda.device(device):
            yield


# ---- passes over [B, M, K] ---------------------------------------------------------------------------------


def launch_passes(
    x: torch.Tensor, direct: Output | None, turned: Output | None, source: str = "plain"
) -> None:
    """All passes that the outputs of one tensor [B, M, K] need.

    Args:
        x: as it lies; for ``swiglu`` the gate [B, M, K], with the up projection K columns further on.
        direct: output in the layout of x, or None.
        turned: output in the layout of its transpose, or None.
        source: a name that ``source_kernels.load_source`` knows.
    """
    arch = hardware.architecture(x.device)
    if direct is not None and direct.block == (1, ALL):
        if turned is None:
            bucket = _row_bucket(x)
            config = launch_tables.lookup(arch, "rows", f"{source}/{bucket}", bucket)
            launch_rows(x, arch, direct, None, config, source)
            return
        config = launch_tables.lookup(arch, "rows_first", _row_bucket(x), "any")
        if turned.block == (ALL, 1) and config["enabled"] and x.shape[2] <= MAX_WHOLE_ROW:
            amax = Amax(column=torch.zeros((x.shape[0], x.shape[2]), dtype=torch.int32, device=x.device))
            launch_rows(x, arch, direct, amax.column, config, source)
            launch_tiles(x, arch, None, turned, amax, source)
            return
    blocks = [o.block for o in (direct, turned) if o is not None]
    amax = allocate_amax(arch, [x], blocks)
    launch_amax(x, arch, amax, blocks, source)
    launch_tiles(x, arch, direct, turned, amax, source)


@dataclass
class Amax:
    """int32 bits of the amax of whole dimensions: partials [B, P], rows [B, M], columns [B, K]."""

    one: torch.Tensor | None = None
    row: torch.Tensor | None = None
    column: torch.Tensor | None = None

    def of(self, block: tuple[int, int]) -> torch.Tensor | None:
        """What blocks of this shape need."""
        kinds = {(ALL, ALL): self.one, (1, ALL): self.row, (ALL, 1): self.column}
        return kinds.get(block)


@dataclass(frozen=True)
class _AmaxPlan:
    tile: tuple[int, int, int]
    warps: int
    steps: int
    tiles_m: int
    tiles_k: int


_KINDS = {(1, ALL): "row", (ALL, 1): "column"}


def _plan_amax(arch: str, shape: torch.Size, blocks: list[tuple[int, int]]) -> _AmaxPlan:
    kinds = sorted({_KINDS[b] for b in blocks if b in _KINDS}, reverse=True)
    config = launch_tables.lookup(arch, "amax", "+".join(kinds) or "one")
    block_m, block_k = _fit(config, shape[2])
    tiles_k = max(1, _blocks(shape[2], block_k))
    steps = config["steps"]
    if (ALL, ALL) in blocks:
        steps = max(steps, _blocks(_blocks(shape[1], block_m) * tiles_k, MAX_PARTIALS))
    tiles_m = max(1, _blocks(shape[1], block_m * steps))
    owned = min(config.get("owned", 1), block_m)
    return _AmaxPlan((block_m, block_k, owned), config["warps"], steps, tiles_m, tiles_k)


def allocate_amax(arch: str, xs: list[torch.Tensor], blocks: list[tuple[int, int]], dim: int = 1) -> Amax:
    """Buffers for the whole dimensions among ``blocks`` of the concatenation of ``xs`` [B, M, K] along ``dim``."""
    batch = xs[0].shape[0]
    rows, columns = (sum(x.shape[d] for x in xs) if d == dim else xs[0].shape[d] for d in (1, 2))
    row, column = (1, ALL) in blocks, (ALL, 1) in blocks
    amax = Amax()
    if row or column:
        zeros = torch.zeros(batch * (row * rows + column * columns), dtype=torch.int32, device=xs[0].device)
        amax.row = zeros[: batch * rows] if row else None
        amax.column = zeros[batch * rows * row :] if column else None
    if (ALL, ALL) in blocks:
        plans = [_plan_amax(arch, x.shape, blocks) for x in xs]
        count = sum(p.tiles_m * p.tiles_k for p in plans)
        amax.one = torch.empty((batch, count), dtype=torch.int32, device=xs[0].device)
    return amax


def launch_amax(
    x: torch.Tensor, arch: str, amax: Amax, blocks: list[tuple[int, int]], source: str = "plain"
) -> int:
    """Fill ``amax`` where ``blocks`` are whole dimensions; returns the number of partials of ``one``."""
    if not any(ALL in b for b in blocks):
        return 0
    plan = _plan_amax(arch, x.shape, blocks)
    programs = plan.tiles_m * plan.tiles_k
    launch(
        triton_kernels.amax_tiles, (x.shape[0] * programs, 1),
        (x, amax.one, amax.row, amax.column, *x.shape[1:], *x.stride(), plan.tiles_m, plan.tiles_k, plan.steps),
        {"ONE": (ALL, ALL) in blocks, "ROW": (1, ALL) in blocks, "COLUMN": (ALL, 1) in blocks,
         "SOURCE": source, "BLOCK_M": plan.tile[0], "BLOCK_K": plan.tile[1], "R": plan.tile[2]},
        plan.warps,
    )  # fmt: skip
    return programs


def _row_bucket(x: torch.Tensor) -> str:
    columns = x.shape[2]
    return str(max(128, _power_of_two(columns))) if columns <= MAX_WHOLE_ROW else "long"


def launch_rows(
    x: torch.Tensor, arch: str, out: Output, column_amax: torch.Tensor | None, config: launch_tables.Config,
    source: str = "plain",
) -> None:  # fmt: skip
    """Rowwise in one read, with the amax of the columns on the way if a buffer is given."""
    batch, rows, columns = x.shape
    whole = columns <= MAX_WHOLE_ROW
    block_k = max(128, _power_of_two(columns)) if whole else config["block_k"]
    tiles = max(1, _blocks(rows, config["rows"]))
    programs = min(tiles, config["programs"]) if "programs" in config else tiles
    launch(
        triton_kernels.quantize_rows, (batch * programs, 1),
        (x, out.data, out.scale, column_amax, rows, columns, *x.stride(), out.data.stride(-2), programs),
        {**_constants(out.fmt, arch), "SOURCE": source, "ROWS": config["rows"], "BLOCK_K": block_k,
         "WHOLE": whole, "COLUMN_AMAX": column_amax is not None},
        config["warps"],
    )  # fmt: skip


def turned_words(turned: Output | None, owned: int, rows: int) -> tuple[int, int]:
    """(rows whose codes are packed into words before they are transposed, words of a row of the output).

    At most ``owned`` rows; fewer where the output's rows hold no whole number of words, or start inside one.
    """
    if turned is None:
        return 1, 0
    packed = turned.fmt.element.packed
    row_codes = int(turned.data.stride(-2)) * packed
    first = int(turned.data.storage_offset()) * packed
    common = math.gcd(rows, row_codes, first)
    owned = owned if common % (4 * packed) == 0 else math.gcd(common, 4 * packed)
    return owned, row_codes >> triton_kernels.folds(turned.fmt.element.name, owned)


def launch_tiles(
    x: torch.Tensor,
    arch: str,
    direct: Output | None,
    turned: Output | None,
    amax: Amax,
    source: str = "plain",
) -> None:
    """The pass that writes: both outputs from one read, or apart where that was faster or is needed."""
    apart = TOGETHER
    if direct is not None and turned is not None:
        apart = how_apart(_tile_config(arch, "both", [direct, turned]), direct, turned)
        if apart == LAUNCHES:
            launch_tiles(x, arch, direct, None, amax, source)
            launch_tiles(x, arch, None, turned, amax, source)
            return
    batch, rows, columns = x.shape
    outputs = [o for o in (direct, turned) if o is not None]
    kind = "both" if len(outputs) == 2 else "direct" if direct is not None else "turned"
    config = _tile_config(arch, kind, outputs)
    blocks = [o.block for o in outputs]
    block_m, block_k = _fit(config, columns, blocks)
    tiles_m, tiles_k = max(1, _blocks(rows, block_m)), max(1, _blocks(columns, block_k))
    owned, pitch = turned_words(turned, min(config.get("owned", 4), block_m), rows)
    partials = 1 if amax.one is None else amax.one.shape[1]
    whole = any(ALL in b for b in blocks)
    constants = {f"D_{k}": v for k, v in block_constants(direct, arch).items()}
    constants |= {f"T_{k}": v for k, v in block_constants(turned, arch).items()}
    quads = turned is not None and bool(config.get("quads", 0)) and _in_quads(rows, block_m, direct, turned)
    if quads:
        pitch = turned_words(turned, 4, rows)[1]
    launch(
        quad_kernels.quantize_quads if quads else triton_kernels.quantize_tiles, (tiles_m * tiles_k, batch),
        (x, *pointers(direct, amax), *pointers(turned, amax), rows, columns, *x.stride(), tiles_m, tiles_k,
         *pitches(direct), pitch, pitches(turned)[1], partials),
        {**constants, "SOURCE": source, "BLOCK_M": block_m, "BLOCK_K": block_k, **({} if quads else {"R": owned}),
         "GROUP": config["group"], "REVERSE": whole and bool(config["reverse"]),
         "PARTIALS": max(MAX_PARTIALS, _power_of_two(partials)),
         "EVICT": "evict_first" if whole and config["evict"] else "", "AGAIN": apart == LOADS},
        config["warps"],
    )  # fmt: skip


def _tile_config(arch: str, kind: str, outputs: list[Output]) -> launch_tables.Config:
    """The entry of ``tiles`` for these outputs, by element and blocks, by blocks, or for any."""
    formats = [o.fmt for o in outputs]
    special = [f"{kind}/{f.element.name}:{f.granularity}" for f in formats]
    return launch_tables.lookup(arch, "tiles", *special, *(f"{kind}/{f.granularity}" for f in formats), kind)


def _in_quads(rows: int, block_m: int, direct: Output | None, turned: Output) -> bool:
    """Whether :mod:`.quad_kernels` can write these outputs: whole words of four rows, and no block of one row."""
    eights = all(o.fmt.element.packed == 1 for o in (direct, turned) if o is not None)
    words = eights and turned_words(turned, 4, rows)[0] == 4
    return words and block_m % 4 == 0 and turned.block[0] != 1


TOGETHER, LAUNCHES, LOADS = 0, 1, 2
"""Values of ``apart`` in a table: two outputs from one load, a launch each, or one launch that loads again."""


def how_apart(config: launch_tables.Config, direct: Output, turned: Output) -> int:
    """One of :data:`TOGETHER`, :data:`LAUNCHES` and :data:`LOADS` for two outputs of the same values."""
    # One set of codes stored both ways comes out wrong on Hopper with Triton 3.6 (the transposed copy differs,
    # seen on an H200, though not in Triton's interpreter), so such outputs never come from one load.
    least = LAUNCHES if same_codes(direct, turned) else TOGETHER
    return max(least, config.get("apart", TOGETHER))


def same_codes(direct: Output, turned: Output) -> bool:
    """Whether the transposed codes are the direct ones, only elsewhere."""
    a, b = direct.fmt, turned.fmt
    return (a.element, a.rounding, direct.block) == (b.element, b.rounding, turned.block)


def pointers(output: Output | None, amax: Amax) -> tuple[torch.Tensor | None, ...]:
    """Data, scale and amax of an output, None where there is none."""
    return (None, None, None) if output is None else (output.data, output.scale, amax.of(output.block))


def pitches(output: Output | None) -> tuple[int, int]:
    """Bytes of a row of the data, scales of a row of the scales."""
    return (0, 0) if output is None else (output.data.stride(-2), output.scale.stride(-2))


# ---- ragged groups ------------------------------------------------------------------------------------------


def _group_amax(x: torch.Tensor, offs: torch.Tensor, arch: str, one: bool) -> torch.Tensor:
    rows, columns = x.shape
    groups = offs.shape[0]
    amax = torch.zeros((groups, 1 if one else columns), dtype=torch.int32, device=x.device)
    config = launch_tables.lookup(arch, "grouped", "amax")
    block_m, block_k = _fit(config, columns)
    tiles_m, tiles_k = _blocks(rows, block_m), _blocks(columns, block_k)
    if tiles_m * tiles_k:
        launch(
            grouped_kernels.group_amax, (tiles_m * tiles_k, 1),
            (x, offs, amax, rows, columns, *x.stride(), groups, tiles_k),
            {"ONE": one, "GROUPS": _power_of_two(groups), "BLOCK_M": block_m, "BLOCK_K": block_k,
             "R": min(config.get("owned", 1), block_m)},
            config["warps"],
        )  # fmt: skip
    return amax


def _group_rows(
    x: torch.Tensor, offs: torch.Tensor, fmt: Format, data: torch.Tensor, scale: torch.Tensor
) -> None:
    arch, (rows, columns) = hardware.architecture(x.device), x.shape
    config = launch_tables.lookup(arch, "grouped", "rows")
    block_m, block_k = _fit(config, columns)
    tiles_m, tiles_k = _blocks(rows, block_m), max(1, _blocks(columns, block_k))
    if not tiles_m:
        return
    groups = offs.shape[0]
    launch(
        grouped_kernels.quantize_group_rows, (tiles_m * tiles_k, 1),
        (x, offs, _group_amax(x, offs, arch, one=True), data, scale, rows, columns, *x.stride(), groups, tiles_k),
        {**_constants(fmt, arch), "GROUPS": _power_of_two(groups), "BLOCK_M": block_m, "BLOCK_K": block_k},
        config["warps"],
    )  # fmt: skip


def _group_columns(
    x: torch.Tensor, offs: torch.Tensor, fmt: Format, align: int, capacity: int,
    data: torch.Tensor, scale: torch.Tensor,
) -> None:  # fmt: skip
    arch, (rows, columns), groups = hardware.architecture(x.device), x.shape, offs.shape[0]
    block = (fmt.block[1], fmt.block[0])
    one = block == (ALL, ALL)
    amax = _group_amax(x, offs, arch, one) if block[0] == ALL else None
    config = launch_tables.lookup(arch, "grouped", f"columns/{fmt.granularity}", "columns")
    block_p, block_k = _fit(config, columns, [block])
    tiles_p, tiles_k = max(1, _blocks(capacity, block_p)), max(1, _blocks(columns, block_k))
    # Group starts and the capacity are multiples of 16, so the owned rows lie in one group and fill words.
    owned = min(config.get("owned", 8), 16)
    pitch = capacity >> triton_kernels.folds(fmt.element.name, owned)
    launch(
        grouped_kernels.quantize_group_columns, (tiles_p * tiles_k, 1),
        (x, offs, amax, data, scale, rows, columns, capacity, *x.stride(), pitch, scale.stride(-2),
         groups, align, tiles_p, tiles_k),
        {**_constants(fmt, arch), "RB": block[0], "CB": block[1], "ONE": one,
         "GROUPS": _power_of_two(groups), "BLOCK_P": block_p, "BLOCK_K": block_k, "R": owned},
        config["warps"],
    )  # fmt: skip


# ---- sizes and constants ------------------------------------------------------------------------------------


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


@functools.cache
def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _fit(
    config: launch_tables.Config, columns: int, blocks: list[tuple[int, int]] | None = None
) -> tuple[int, int]:
    """Tile (rows, columns): no narrower than the blocks, no wider than a row needs, of the table's size."""
    least_m = max((b[0] for b in blocks or ()), default=1)
    least_k = max((b[1] for b in blocks or ()), default=1)
    block_m, block_k = config["block_m"], config["block_k"]
    wanted = max(least_k, min(block_k, max(16, _power_of_two(columns))))
    return max(least_m, block_m * block_k // wanted if wanted < block_k else block_m), wanted


@functools.cache
def _constants(fmt: Format, arch: str) -> dict[str, str]:
    cast = _CASTS.get(arch, {}).get(fmt.element.name, "none")
    return {"ELEMENT": fmt.element.name, "ROUNDING": fmt.rounding, "CAST": cast}


def block_constants(out: Output | None, arch: str) -> dict[str, str | int]:
    """Compile-time constants of an output, those of an absent one too."""
    if out is None:
        return _ABSENT
    return {**_constants(out.fmt, arch), "RB": out.block[0], "CB": out.block[1]}
