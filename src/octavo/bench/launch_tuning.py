"""Launch tables from timed candidates: what ``octavo tune --launch`` does on the card that it runs on.

A space is one kind of work with the candidates that may serve it. Every candidate's results are compared with the
reference before it is timed, by the rule of its space (codes bit for bit; products in dB), and one that does not
compile or differs is a row that says so. The fastest replaces the table's entry where it is faster by ``MARGIN``.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo import formats as F
from octavo import hardware
from octavo.bench import timing
from octavo.bench.agreement import same_bits, sqnr_db
from octavo.bench.timing import Contender, Inputs
from octavo.formats import Format
from octavo.matmul import candidates as product_candidates
from octavo.matmul import launch_tables as product_tables
from octavo.quantize import candidates, launch_tables

MARGIN = 1.02
"""How many times faster than the table a candidate must be to replace it."""
SHARE = 0.01
"""Share of codes of fused values that may differ from the reference: exp differs in its last bit."""
SQNR_DB = 50.0
"""Least agreement of a product with the reference on the same operands, without fast accumulation."""

ROW = Format(F.E4M3FN, "rowwise", "power_of_two")
ONE, B1, B128 = (Format(F.E4M3FN, name) for name in ("tensorwise", "1x128", "128x128"))
MX8, MX4 = F.MXFP8, F.MXFP4
DENSE: dict[str, tuple[Format | None, Format | None]] = {
    "row": (ROW, None), "tensorwise": (ONE, None), "column^T": (None, ROW), "tensorwise both": (ONE, ONE),
    "rowwise both": (ROW, ROW), "1x128": (B1, None), "1x128^T": (None, B1), "1x128 both": (B1, B1),
    "128x128": (B128, None), "128x128 both": (B128, B128), "mxfp8": (MX8, None), "mxfp8^T": (None, MX8),
    "mxfp8 both": (MX8, MX8), "mxfp4": (MX4, None), "mxfp4 both": (MX4, MX4),
}  # fmt: skip
"""Formats of the matrix as it lies and of its transpose, by case."""
SHAPES = ((8192, 4096), (28672, 4096))
TOKENS, HIDDEN = 8192, 14336

Candidate = Any
Row = dict[str, Any]


@dataclass(frozen=True)
class Space:
    """One kind of work.

    Args:
        room: ``quantize`` or ``matmul``: whose table it belongs to.
        name: of the case.
        make: fresh inputs for each size, on the GPU.
        call: Octavo's launch code on one set of inputs; returns tensors, None for absent ones.
        wrong: given inputs and result, what differs from the reference, or None.
        candidates: pieces of a launch table.
        override: the context that puts a candidate first.
    """

    room: str
    name: str
    make: Callable[[], list[Inputs]]
    call: Callable[..., Any]
    wrong: Callable[[Inputs, Any], str | None]
    candidates: list[Candidate]
    override: Callable[[Candidate], AbstractContextManager[None]] = field(default=launch_tables.override)


def _matrix(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, device="cuda")
    x[:: rows // 8] *= 100
    return x.bfloat16()


def _dense(name: str, fmt: Format | None, turned: Format | None) -> Space:
    from octavo.fused import reference
    from octavo.quantize import triton_launch

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        direct, transposed = triton_launch.quantize_optional(x, fmt, turned)
        return *direct, *transposed

    def wrong(inputs: Inputs, found: Any) -> str | None:
        wanted = (
            *reference.quantize_optional(inputs[0], fmt),
            *reference.quantize_optional(inputs[0], turned, transpose=True),
        )
        return same_bits(found, wanted)

    return Space(
        "quantize",
        name,
        lambda: [(_matrix(*shape),) for shape in SHAPES],
        call,
        wrong,
        candidates.DENSE[name],
    )


def _fused(name: str, fmt: Format, backward: bool) -> Space:
    from octavo.fused import reference, triton_launch

    def make() -> list[Inputs]:
        h, grad = _matrix(TOKENS, 2 * HIDDEN), _matrix(TOKENS, HIDDEN)
        return [(h, grad)]

    def call(h: torch.Tensor, grad: torch.Tensor) -> Any:
        if backward:
            return triton_launch.swiglu_backward_quantize(h, grad, fmt, fmt, fmt, False)
        return triton_launch.swiglu_quantize(h, fmt)

    def wrong(inputs: Inputs, found: Any) -> str | None:
        # Part of the rows would have other scales where a scale spans them, so all are compared.
        if backward:
            h, grad = inputs
            return same_bits(found, reference.swiglu_backward_quantize(h, grad, fmt, fmt, fmt, False), SHARE)
        return same_bits(found, reference.swiglu_quantize(inputs[0], fmt), SHARE)

    return Space("quantize", name, make, call, wrong, candidates.FUSED[name])


def _product(name: str, fast: bool, fmt: Format, weight: Format) -> Space:
    from octavo.matmul import reference, triton_launch
    from octavo.quantize import quantize

    def make() -> list[Inputs]:
        return [
            (quantize(_matrix(TOKENS, 4096), fmt), quantize(_matrix(n, 4096), weight)) for n in (4096, 28672)
        ]

    def call(a: Any, b: Any) -> torch.Tensor:
        return triton_launch.scaled_mm(a, b, None, torch.bfloat16, fast)

    def wrong(inputs: Inputs, found: Any) -> str | None:
        a, b = inputs
        wanted = reference.scaled_mm(a, b, None, torch.float32, False)
        db = sqnr_db(found, wanted)
        return None if db >= (SQNR_DB if not fast else 30.0) else f"{db:.1f} dB from the reference"

    options = [{name: (config,)} for config in product_candidates.DENSE[name]]
    return Space("matmul", name, make, call, wrong, options, product_tables.override)


def spaces(rooms: tuple[str, ...] = ("quantize", "fused", "matmul", "experts")) -> Iterator[Space]:
    """The spaces of these rooms; fused producers belong to the table of quantization, experts to both."""
    if "quantize" in rooms:
        for name, pair in DENSE.items():
            yield _dense(name, *pair)
    if "fused" in rooms:
        for name in candidates.FUSED:
            fmt = {"tensorwise": ONE, "row": ROW, "1x128": B1, "mxfp8": MX8}[name.split()[-1]]
            yield _fused(name, fmt, "back" in name)
    if "matmul" in rooms:
        yield _product("dense epilogue", False, ROW, ROW)
        yield _product("dense fast epilogue", True, ROW, ROW)
        yield _product("dense block", False, B1, B128)
        yield _product("dense blockrows", False, B1, B1)
    if "experts" in rooms:
        from octavo.bench import grouped_tuning

        yield from grouped_tuning.spaces()


def time_space(space: Space, rounds: int = 7) -> list[Row]:
    """Check the table's launch and every candidate, and time what is right: rows with ``ms`` or ``error``."""
    sets, rows = space.make(), []
    # Replayed as a graph: the host takes longer to launch most of these than the device to run them.
    many = [
        [inputs, *(copy.deepcopy(inputs) for _ in range(timing.copies(timing.nbytes(inputs), most=8) - 1))]
        for inputs in sets
    ]
    for candidate in ({}, *space.candidates):
        row: Row = {"room": space.room, "case": space.name, "candidate": _plain(candidate)}
        rows.append(row)
        try:
            with space.override(candidate):
                for inputs in sets:
                    problem = space.wrong(inputs, space.call(*inputs))
                    if problem is not None:
                        raise AssertionError(problem)
                contenders = {"it": Contender(lambda *a: space.call(*a))}
                row["ms"] = [timing.replay_ms(contenders, copied, rounds)["it"] for copied in many]
        except Exception as error:  # what the compiler or the card refuses is a result, not an end
            row["error"] = f"{type(error).__name__}: {str(error).strip()[:160]}"
        torch.cuda.empty_cache()
    return rows


def best(rows: list[Row]) -> Row | None:
    """The candidate that replaces the table's entry, if one is faster by ``MARGIN`` over all sizes."""
    timed = [(math.prod(row["ms"]), row) for row in rows if "ms" in row]
    fastest = min(timed, key=lambda pair: pair[0], default=None)
    if fastest is None or not fastest[1]["candidate"]:
        return None
    table = next((score for score, row in timed if not row["candidate"]), math.inf)
    won = table / fastest[0] >= MARGIN ** len(fastest[1]["ms"])
    return fastest[1] if won else None


def _plain(candidate: Candidate) -> Any:
    if isinstance(candidate, Mapping):
        return {key: _plain(value) for key, value in candidate.items()}
    if isinstance(candidate, tuple):
        return [_plain(value) for value in candidate]
    return product_tables.entry(candidate) if isinstance(candidate, product_tables.Config) else candidate


def tune(
    rooms: tuple[str, ...], folder: Path, seconds: float, progress: Callable[[str], None] = lambda line: None
) -> tuple[list[Path], list[Row]]:
    """Time the spaces of ``rooms`` on the current GPU and write what won to ``folder``.

    Args:
        rooms: of ``quantize``, ``fused``, ``matmul`` and ``experts``.
        folder: for ``quantize-<architecture>.json`` and ``matmul-<architecture>.json``, entries that replace those
            of the committed tables where ``$OCTAVO_TABLES`` or the user's folder names it.
        seconds: start no further space after this long.
        progress: called with a line a space.

    Returns:
        The files written, and every row.
    """
    started, rows, won = time.monotonic(), [], []
    for space in spaces(rooms):
        if time.monotonic() - started > seconds:
            progress(f"out of time before {space.name}")
            break
        found = time_space(space)
        rows += found
        winner = best(found)
        if winner:
            won.append(winner)
            write(won, folder)
        table = next((r for r in found if not r["candidate"]), {})
        shown = (
            "keeps its entry" if winner is None else f"{winner['ms']} ms by {json.dumps(winner['candidate'])}"
        )
        failed = sum("error" in r for r in found)
        progress(f"{space.name}: table {table.get('ms', table.get('error'))} ms, {shown}, {failed} failed")
    return write(won, folder), rows


def write(won: list[Row], folder: Path) -> list[Path]:
    """Merge winners into the overlay files of the current architecture in ``folder``; the paths written."""
    arch = hardware.architecture(torch.device("cuda"))
    return write_for(won, folder, arch)


def write_for(won: list[Row], folder: Path, arch: str) -> list[Path]:
    """As :func:`write`, for a named architecture."""
    paths = []
    for room, merge in (("quantize", launch_tables.merge), ("matmul", lambda old, new: {**old, **new})):
        mine = [row["candidate"] for row in won if row["room"] == room]
        if not mine:
            continue
        path = folder / f"{room}-{arch}.json"
        table: Any = json.loads(path.read_text()) if path.exists() else {}
        for candidate in mine:
            table = merge(table, candidate)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
        paths.append(path)
    launch_tables.load.cache_clear()
    product_tables.load.cache_clear()
    return paths
