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
from typing import Any

import torch
import triton

from octavo import hardware
from octavo.formats import ALL, Format
from octavo.quantize import grouped as padded_groups
from octavo.quantize import grouped_kernels, launch_tables, triton_kernels

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

# Type checkers see the functions below the decorators, which take no launch options.
_KERNELS: Any = triton_kernels
_GROUPED: Any = grouped_kernels

Pair = tuple[torch.Tensor, torch.Tensor]
_NOTHING: Pair = (torch.empty(0), torch.empty(0))


@dataclass(frozen=True)
class _Output:
    """One output of a pass over x [B, M, K]; ``block`` counts rows and columns of x."""

    fmt: Format
    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]


_ABSENT = {"ELEMENT": "", "ROUNDING": "", "CAST": "", "RB": 1, "CB": 1}


def quantize(x: torch.Tensor, fmt: Format, transpose: bool) -> Pair:
    """Kernel of ``octavo::quantize``."""
    return _quantize(x, None, fmt)[1] if transpose else _quantize(x, fmt, None)[0]


def quantize_both(
    x: torch.Tensor, fmt: Format, transposed_fmt: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kernel of ``octavo::quantize_both``."""
    direct, turned = _quantize(x, fmt, transposed_fmt)
    return *direct, *turned


def quantize_groups(x: torch.Tensor, offs: torch.Tensor, fmt: Format, transpose: bool, align: int) -> Pair:
    """Kernel of ``octavo::quantize_groups``; the group ends stay on the device."""
    rows, cols = x.shape
    with _on(x.device):
        if not transpose:
            data, scale = _empty(x, (rows, cols), fmt), x.new_empty((rows, 1), dtype=torch.float32)
            _group_rows(x, offs, fmt, data, scale)
        else:
            capacity = padded_groups.capacity(rows, offs.shape[0], align)
            data = _empty(x, fmt.data_shape((cols, capacity)), fmt)
            shape = fmt.scale_shape((cols, capacity))
            if fmt.block[1] == ALL:
                shape = (offs.shape[0], *shape)
            scale = _empty_scale(x, shape, fmt)
            _group_columns(x, offs, fmt, align, capacity, data, scale)
    return _typed(data, scale, fmt)


def _quantize(x: torch.Tensor, fmt: Format | None, turned_fmt: Format | None) -> tuple[Pair, Pair]:
    batch = x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    lead = x.shape[:-2]
    direct = None if fmt is None else _output(batch, fmt, fmt.block)
    turned = (
        None
        if turned_fmt is None
        else _output(batch.mT, turned_fmt, (turned_fmt.block[1], turned_fmt.block[0]))
    )
    if batch.shape[0]:
        with _on(x.device):
            if batch.stride(-1) != 1 and batch.stride(-2) == 1:
                _launch(batch.mT, _transposed(turned), _transposed(direct))
            else:
                _launch(batch, direct, turned)
    return _result(direct, lead), _result(turned, lead)


def _output(x: torch.Tensor, fmt: Format, block: tuple[int, int]) -> _Output:
    return _Output(
        fmt, _empty(x, fmt.data_shape(x.shape), fmt), _empty_scale(x, fmt.scale_shape(x.shape), fmt), block
    )


def _transposed(output: _Output | None) -> _Output | None:
    return (
        None
        if output is None
        else _Output(output.fmt, output.data, output.scale, (output.block[1], output.block[0]))
    )


def _empty(x: torch.Tensor, shape: tuple[int, ...], fmt: Format) -> torch.Tensor:
    # Bytes, typed at the end: PyTorch cannot fill some narrow types in deterministic mode, nor Triton take them.
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _empty_scale(x: torch.Tensor, shape: tuple[int, ...], fmt: Format) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8 if fmt.is_mx else torch.float32, device=x.device)


def _typed(data: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Pair:
    return data.view(fmt.element.dtype), scale.view(fmt.scale_dtype)


def _result(output: _Output | None, lead: torch.Size) -> Pair:
    if output is None:
        return _NOTHING
    data, scale = _typed(output.data, output.scale, output.fmt)
    if len(lead) != 1:
        data, scale = data.view(*lead, *data.shape[-2:]), scale.view(*lead, *scale.shape[-2:])
    return data, scale


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Launch on the tensor's device, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        yield
    else:
        with torch.cuda.device(device):
            yield


# ---- passes over [B, M, K] ---------------------------------------------------------------------------------


def _launch(x: torch.Tensor, direct: _Output | None, turned: _Output | None) -> None:
    arch = hardware.architecture(x.device)
    amax = _Amax()
    reads_twice = any(ALL in o.block for o in (direct, turned) if o is not None)
    if direct is not None and direct.block == (1, ALL):
        if turned is None:
            _rows(x, arch, direct, None, launch_tables.lookup(arch, "rows", _row_bucket(x), "long"))
            return
        config = launch_tables.lookup(arch, "rows_first", _row_bucket(x), "any")
        if turned.block == (ALL, 1) and config["enabled"] and x.shape[2] <= MAX_WHOLE_ROW:
            amax.column = torch.zeros((x.shape[0], x.shape[2]), dtype=torch.int32, device=x.device)
            _rows(x, arch, direct, amax.column, config)
            direct = None
    if reads_twice and amax.column is None:
        _amax(x, arch, amax, [o.block for o in (direct, turned) if o is not None])
    _tiles(x, arch, direct, turned, amax, reads_twice)


@dataclass
class _Amax:
    """int32 bits of the amax of whole dimensions: partials [B, P], rows [B, M], columns [B, K]."""

    one: torch.Tensor | None = None
    row: torch.Tensor | None = None
    column: torch.Tensor | None = None


def _row_bucket(x: torch.Tensor) -> str:
    columns = x.shape[2]
    return str(max(128, _power_of_two(columns))) if columns <= MAX_WHOLE_ROW else "long"


def _rows(
    x: torch.Tensor, arch: str, out: _Output, column_amax: torch.Tensor | None, config: launch_tables.Config
) -> None:
    batch, rows, columns = x.shape
    whole = columns <= MAX_WHOLE_ROW
    block_k = max(128, _power_of_two(columns)) if whole else config["block_k"]
    tiles = max(1, _blocks(rows, config["rows"]))
    programs = min(tiles, config["programs"]) if "programs" in config else tiles
    _KERNELS.quantize_rows[(batch * programs,)](
        x, out.data, out.scale, column_amax,
        rows, columns, *x.stride(), programs,
        **_constants(out.fmt, arch),
        ROWS=config["rows"], BLOCK_K=block_k, WHOLE=whole, COLUMN_AMAX=column_amax is not None,
        num_warps=config["warps"],
    )  # fmt: skip


def _amax(x: torch.Tensor, arch: str, amax: _Amax, blocks: list[tuple[int, int]]) -> None:
    batch, rows, columns = x.shape
    one, row, column = (ALL, ALL) in blocks, (1, ALL) in blocks, (ALL, 1) in blocks
    kinds = [name for name, wanted in (("row", row), ("column", column)) if wanted]
    config = launch_tables.lookup(arch, "amax", "+".join(kinds) or "one")
    block_m, block_k = _fit(config, columns)
    tiles_k = max(1, _blocks(columns, block_k))
    steps = config["steps"]
    if one:
        steps = max(steps, _blocks(_blocks(rows, block_m) * tiles_k, MAX_PARTIALS))
    tiles_m = max(1, _blocks(rows, block_m * steps))
    if row or column:
        zeros = torch.zeros(batch * (row * rows + column * columns), dtype=torch.int32, device=x.device)
        amax.row = zeros[: batch * rows] if row else None
        amax.column = zeros[batch * rows * row :] if column else None
    if one:
        amax.one = torch.empty((batch, tiles_m * tiles_k), dtype=torch.int32, device=x.device)
    _KERNELS.amax_tiles[(batch * tiles_m * tiles_k,)](
        x, amax.one, amax.row, amax.column,
        rows, columns, *x.stride(), tiles_m, tiles_k, steps,
        ONE=one, ROW=row, COLUMN=column, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=config["warps"],
    )  # fmt: skip


def _tiles(
    x: torch.Tensor, arch: str, direct: _Output | None, turned: _Output | None, amax: _Amax, reads_twice: bool
) -> None:
    batch, rows, columns = x.shape
    outputs = [o for o in (direct, turned) if o is not None]
    kind = "both" if len(outputs) == 2 else "direct" if direct is not None else "turned"
    config = launch_tables.lookup(arch, "tiles", *(f"{kind}/{o.fmt.granularity}" for o in outputs), kind)
    block_m, block_k = _fit(config, columns, [o.block for o in outputs])
    tiles_m, tiles_k = max(1, _blocks(rows, block_m)), max(1, _blocks(columns, block_k))
    partials = 1 if amax.one is None else amax.one.shape[1]
    constants = {
        f"D_{k}": v for k, v in (_ABSENT if direct is None else _block_constants(direct, arch)).items()
    }
    constants |= {
        f"T_{k}": v for k, v in (_ABSENT if turned is None else _block_constants(turned, arch)).items()
    }
    _KERNELS.quantize_tiles[(batch * tiles_m * tiles_k,)](
        x, *((None, None) if direct is None else (direct.data, direct.scale)),
        *((None, None) if turned is None else (turned.data, turned.scale)),
        amax.one, amax.row, amax.column,
        rows, columns, *x.stride(), tiles_m, tiles_k, partials,
        DIRECT=direct is not None, TURNED=turned is not None, **constants,
        BLOCK_M=block_m, BLOCK_K=block_k, GROUP=config["group"],
        REVERSE=reads_twice and bool(config["reverse"]), PARTIALS=max(MAX_PARTIALS, _power_of_two(partials)),
        EVICT="evict_first" if reads_twice and config["evict"] else "",
        num_warps=config["warps"],
    )  # fmt: skip


# ---- ragged groups ------------------------------------------------------------------------------------------


def _group_amax(x: torch.Tensor, offs: torch.Tensor, arch: str, one: bool) -> torch.Tensor:
    rows, columns = x.shape
    groups = offs.shape[0]
    amax = torch.zeros((groups, 1 if one else columns), dtype=torch.int32, device=x.device)
    config = launch_tables.lookup(arch, "grouped", "amax")
    block_m, block_k = _fit(config, columns)
    tiles_m, tiles_k = _blocks(rows, block_m), _blocks(columns, block_k)
    if tiles_m * tiles_k:
        _GROUPED.group_amax[(tiles_m * tiles_k,)](
            x, offs, amax, rows, columns, *x.stride(), groups, tiles_k,
            ONE=one, GROUPS=_power_of_two(groups), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=config["warps"],
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
    _GROUPED.quantize_group_rows[(tiles_m * tiles_k,)](
        x, offs, _group_amax(x, offs, arch, one=True), data, scale,
        rows, columns, *x.stride(), groups, tiles_k, **_constants(fmt, arch),
        GROUPS=_power_of_two(groups), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=config["warps"],
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
    _GROUPED.quantize_group_columns[(tiles_p * tiles_k,)](
        x, offs, amax, data, scale, rows, columns, capacity, *x.stride(), groups, align, tiles_p, tiles_k,
        **_constants(fmt, arch), RB=block[0], CB=block[1], ONE=one,
        GROUPS=_power_of_two(groups), BLOCK_P=block_p, BLOCK_K=block_k, num_warps=config["warps"],
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


def _block_constants(out: _Output, arch: str) -> dict[str, str | int]:
    return {**_constants(out.fmt, arch), "RB": out.block[0], "CB": out.block[1]}
