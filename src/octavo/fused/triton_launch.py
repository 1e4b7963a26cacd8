"""Launches of the fused producers' Triton kernels."""

from __future__ import annotations

import math

import torch

from octavo import hardware
from octavo.formats import ALL, Format
from octavo.fused import triton_kernels as kernels
from octavo.launch import launch
from octavo.quantize import launch_tables, triton_launch
from octavo.quantize.triton_launch import Amax, Output

Tensors = tuple[torch.Tensor | None, ...]


# ---- concatenation ------------------------------------------------------------------------------------------


def quantize_concat(
    xs: list[torch.Tensor], dim: int, fmt: Format | None, transposed_fmt: Format | None
) -> Tensors:
    """Kernel of ``octavo::quantize_concat``: each matrix is written to its slice of the outputs."""
    joined = [sum(x.shape[dim] for x in xs) if d == dim else xs[0].shape[d] for d in (0, 1)]
    shape = torch.Size((1, *joined))
    formats = [f for f in (fmt, transposed_fmt) if f is not None]
    if not formats:
        return None, None, None, None
    if not _slices(xs, dim, fmt, transposed_fmt):
        x = torch.cat(xs, dim)
        direct, turned = triton_launch.quantize_optional(x, fmt, transposed_fmt)
        return (
            _pair(fmt, direct),
            _pair(fmt, direct, 1),
            _pair(transposed_fmt, turned),
            _pair(transposed_fmt, turned, 1),
        )
    whole = triton_launch.outputs(xs[0], shape, fmt, transposed_fmt)
    with triton_launch.on_device(xs[0].device):
        _concat(xs, dim, whole)
    return *_finished(whole[0]), *_finished(whole[1])


def _pair(fmt: Format | None, pair: triton_launch.Pair, n: int = 0) -> torch.Tensor | None:
    return None if fmt is None else pair[n]


def _finished(out: Output | None) -> Tensors:
    if out is None:
        return None, None
    data, scale = triton_launch.typed(out.data, out.scale, out.fmt)
    return data[0], scale[0]


def _slices(xs: list[torch.Tensor], dim: int, fmt: Format | None, transposed_fmt: Format | None) -> bool:
    """Whether every matrix starts at a block of every output and at a whole byte."""
    blocks = [f.block for f in (fmt,) if f is not None]
    blocks += [(f.block[1], f.block[0]) for f in (transposed_fmt,) if f is not None]
    packed = max(f.element.packed for f in (fmt, transposed_fmt) if f is not None)
    step = math.lcm(packed, *(b[dim] for b in blocks if b[dim] != ALL))
    return all(x.shape[dim] % step == 0 for x in xs[:-1]) and all(x.numel() for x in xs)


def _concat(xs: list[torch.Tensor], dim: int, whole: tuple[Output | None, Output | None]) -> None:
    arch, blocks = hardware.architecture(xs[0].device), [o.block for o in whole if o is not None]
    batches = [x.unsqueeze(0) for x in xs]
    starts = [sum(x.shape[dim] for x in xs[:n]) for n in range(len(xs))]
    parts = [
        tuple(None if o is None else _part(o, n == 1, dim, start, x.shape[dim]) for n, o in enumerate(whole))
        for x, start in zip(xs, starts, strict=True)
    ]
    if blocks == [(1, ALL)] and whole[0] is not None and dim == 0:
        for x, (direct, _) in zip(batches, parts, strict=True):
            triton_launch.launch_passes(x, direct, None)
        return
    amax = triton_launch.allocate_amax(arch, batches, blocks, dim + 1)
    done, shares = 0, []
    for x, start in zip(batches, starts, strict=True):
        share = _share(amax, dim, start, x.shape[dim + 1], done)
        done += triton_launch.launch_amax(x, arch, share, blocks)
        shares.append(Amax(amax.one, share.row, share.column))
    for x, share, (direct, turned) in zip(batches, shares, parts, strict=True):
        triton_launch.launch_tiles(x, arch, direct, turned, share)


def _share(amax: Amax, dim: int, start: int, size: int, done: int) -> Amax:
    """The part of the shared buffers that one matrix fills."""
    row, column = amax.row, amax.column
    if dim == 0 and row is not None:
        row = row[start : start + size]
    if dim == 1 and column is not None:
        column = column[start : start + size]
    return Amax(None if amax.one is None else amax.one[:, done:], row, column)


def _part(out: Output, turned: bool, dim: int, start: int, size: int) -> Output:
    """The slice of an output that one matrix is written to."""
    along, packed = (2 - dim if turned else 1 + dim), out.fmt.element.packed
    extent = out.block[dim]
    bytes_ = (start // packed, -(-size // packed)) if along == 2 else (start, size)
    data = out.data.narrow(along, *bytes_)
    scale = out.scale if extent == ALL else out.scale.narrow(along, start // extent, -(-size // extent))
    return Output(out.fmt, data, scale, out.block)


# ---- SwiGLU -------------------------------------------------------------------------------------------------


def swiglu_quantize(h: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel of ``octavo::swiglu_quantize``."""
    gate = h.unsqueeze(0)[..., : h.shape[1] // 2]
    out, _ = triton_launch.outputs(h, gate.shape, fmt, None)
    assert out is not None
    if gate.numel():
        with triton_launch.on_device(h.device):
            triton_launch.launch_passes(gate, out, None, "swiglu")
    data, scale = triton_launch.typed(out.data, out.scale, fmt)
    return data[0], scale[0]


STEPS = 3
"""Further value of ``apart`` in a table: the gradient and the activation are written in 16 bits first."""


def swiglu_backward_quantize(
    h: torch.Tensor, grad: torch.Tensor, fmt: Format | None, transposed_fmt: Format | None,
    activation_fmt: Format | None, keep: bool,
) -> Tensors:  # fmt: skip
    """Kernel of ``octavo::swiglu_backward_quantize``."""
    rows, columns = grad.shape
    arch = hardware.architecture(h.device)
    formats = [f for f in (fmt, transposed_fmt, activation_fmt) if f is not None]
    config = launch_tables.lookup(
        arch, "swiglu_backward", *(f"tiles/{f.granularity}" for f in formats), "tiles"
    )
    h, grad = (t if t.stride(1) == 1 else t.contiguous() for t in (h, grad))
    if not rows or not columns or _straddles(columns, fmt, transposed_fmt) or config.get("apart", 0) == STEPS:
        return _backward_in_steps(h, grad, fmt, transposed_fmt, activation_fmt, keep, config)
    direct, turned = triton_launch.outputs(h, torch.Size((1, rows, 2 * columns)), fmt, transposed_fmt)
    _, act = triton_launch.outputs(h, torch.Size((1, rows, columns)), None, activation_fmt)
    kept = (h.new_empty(h.shape), h.new_empty(grad.shape)) if keep else (None, None)
    with triton_launch.on_device(h.device):
        amaxes = _backward_amax(h, grad, arch, direct, turned, act)
        for n, outputs in enumerate(_apart(config, direct, turned, act)):
            _backward_tiles(h, grad, arch, config, outputs, amaxes, kept if n == 0 else (None, None))
    return *_finished(direct), *_finished(turned), *_finished(act), *kept


Three = tuple[Output | None, Output | None, Output | None]


def _straddles(columns: int, fmt: Format | None, transposed_fmt: Format | None) -> bool:
    """Whether a block or a byte would hold columns of gate and of up."""
    sizes = [(f.block[1], f.element.packed) for f in (fmt,) if f is not None]
    sizes += [(f.block[0], 1) for f in (transposed_fmt,) if f is not None]
    return any((block != ALL and columns % block) or columns % packed for block, packed in sizes)


def _apart(
    config: launch_tables.Config, direct: Output | None, turned: Output | None, act: Output | None
) -> list[Three]:
    """What each launch writes: all three outputs, or first what lies as h does and then what is transposed."""
    if direct is None or (turned is None and act is None):
        return [(direct, turned, act)]
    how = config.get("apart", triton_launch.TOGETHER)
    if turned is not None:
        how = triton_launch.how_apart(config, direct, turned)
    if how == triton_launch.LAUNCHES:
        return [(direct, None, None), (None, turned, act)]
    return [(direct, turned, act)]


def _part_config(arch: str, config: launch_tables.Config, outputs: Three) -> launch_tables.Config:
    """The configuration of one launch: of its part, where the outputs are written apart."""
    direct, turned, act = outputs
    if outputs == (None, None, None):
        kind = "values"
    elif direct is None:
        kind = "turned"
    elif turned is None and act is None:
        kind = "direct"
    else:
        return config
    formats = [o.fmt.granularity for o in outputs if o is not None]
    return launch_tables.lookup(arch, "swiglu_backward", *(f"{kind}/{g}" for g in formats), kind)


def _backward_in_steps(
    h: torch.Tensor, grad: torch.Tensor, fmt: Format | None, transposed_fmt: Format | None,
    activation_fmt: Format | None, keep: bool, config: launch_tables.Config,
) -> Tensors:  # fmt: skip
    # Blocks would straddle gate and up, or the registers of the card do not hold what one pass needs: one kernel
    # writes the values in 16 bits, and they are quantized as any matrix.
    dh, a = torch.empty_like(h, memory_format=torch.contiguous_format), h.new_empty(grad.shape)
    if grad.numel():
        with triton_launch.on_device(h.device):
            arch = hardware.architecture(h.device)
            _backward_tiles(h, grad, arch, config, (None, None, None), (Amax(), Amax()), (dh, a))
    direct, turned = triton_launch.quantize_optional(dh, fmt, transposed_fmt)
    _, act = triton_launch.quantize_optional(a, None, activation_fmt)
    pairs = ((fmt, direct), (transposed_fmt, turned), (activation_fmt, act))
    return *(_pair(f, p, n) for f, p in pairs for n in (0, 1)), *((dh, a) if keep else (None, None))


def _backward_amax(
    h: torch.Tensor, grad: torch.Tensor, arch: str, *outputs: Output | None
) -> tuple[Amax, Amax]:
    """Amax of the gradient and of the activation, where a format needs whole dimensions."""
    direct, turned, act = outputs
    rows, columns = grad.shape
    blocks = [o.block for o in (direct, turned) if o is not None]
    sizes = {(ALL, ALL): 1, (1, ALL): rows, (ALL, 1): 2 * columns}
    wanted = [blocks.count(b) > 0 for b in sizes]
    a_sizes = {(ALL, ALL): 1, (ALL, 1): columns}
    a_wanted = [act is not None and act.block == b for b in a_sizes]
    if not any((*wanted, *a_wanted)):
        return Amax(), Amax()
    lengths = [n * w for n, w in zip((*sizes.values(), *a_sizes.values()), (*wanted, *a_wanted), strict=True)]
    # Each buffer starts at a multiple of 16 bytes, as the kernels' specialization has it.
    padded = [-(-n // 4) * 4 for n in lengths]
    pieces = torch.zeros(sum(padded), dtype=torch.int32, device=h.device).split(padded)
    one, row, column, a_one, a_column = (p[:n] if n else None for p, n in zip(pieces, lengths, strict=True))
    config = launch_tables.lookup(arch, "swiglu_backward", "amax")
    block_m, block_k, steps = config["block_m"], config["block_k"], config["steps"]
    tiles_k, tiles_m = -(-columns // block_k), -(-rows // (block_m * steps))
    launch(
        kernels.swiglu_backward_amax, (tiles_m * tiles_k, 1),
        (h, grad, one, row, column, a_one, a_column, rows, columns, h.stride(0), grad.stride(0), tiles_k, steps),
        {"ONE": wanted[0], "ROW": wanted[1], "COLUMN": wanted[2], "A_ONE": a_wanted[0], "A_COLUMN": a_wanted[1],
         "BLOCK_M": block_m, "BLOCK_K": block_k, "R": config["owned"]},
        config["warps"],
    )  # fmt: skip
    # Read back as [B, P] partials with one partial.
    return (
        Amax(None if one is None else one.view(1, 1), row, column),
        Amax(None if a_one is None else a_one.view(1, 1), None, a_column),
    )


def _backward_tiles(
    h: torch.Tensor, grad: torch.Tensor, arch: str, config: launch_tables.Config,
    outputs: Three, amaxes: tuple[Amax, Amax], kept: Tensors,
) -> None:  # fmt: skip
    direct, turned, act = outputs
    config = _part_config(arch, config, outputs)
    rows, columns = grad.shape
    blocks = [o.block for o in outputs if o is not None]
    block_m = max(config["block_m"], *(b[0] for b in blocks), 1)
    block_k = max(config["block_k"], *(b[1] for b in blocks), 1)
    sides = [triton_launch.turned_words(o, config["owned"], rows) for o in (turned, act) if o is not None]
    owned = min((r for r, _ in sides), default=1)
    t_pitch, a_pitch = (triton_launch.turned_words(o, owned, rows)[1] for o in (turned, act))
    again = direct is not None and turned is not None and config.get("apart", 0) == triton_launch.LOADS
    constants = {
        f"{letter}_{k}": v
        for letter, out in (("D", direct), ("T", turned), ("A", act))
        for k, v in triton_launch.block_constants(out, arch).items()
    }
    tiles_m, tiles_k = -(-rows // block_m), -(-columns // block_k)
    launch(
        kernels.swiglu_backward_tiles, (tiles_m * tiles_k, 1),
        (h, grad, *triton_launch.pointers(direct, amaxes[0]), *triton_launch.pointers(turned, amaxes[0]),
         *triton_launch.pointers(act, amaxes[1]), *kept, rows, columns, h.stride(0), grad.stride(0),
         tiles_m, tiles_k, *triton_launch.pitches(direct), t_pitch, triton_launch.pitches(turned)[1],
         a_pitch, triton_launch.pitches(act)[1]),
        {**constants, "KEEP": kept[0] is not None, "BLOCK_M": block_m, "BLOCK_K": block_k, "R": owned,
         "GROUP": config["group"], "AGAIN": again},
        min(16, config["warps"] * max(1, block_m * block_k // (config["block_m"] * config["block_k"]))),
    )  # fmt: skip
