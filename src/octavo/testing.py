"""Measures and inputs for tests: SQNR, the outlier inputs of the numerics contract, poisoned allocations.

No module of the package imports this one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

ROW_OUTLIER, COLUMN_OUTLIER = 100.0, 30.0
"""Factors of the outlier rows and columns of :func:`outlier_matrix`."""
OUTLIER_SHARE = 1e-3
"""Share of rows, and of columns, that are outliers."""


def sqnr(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to quantization noise ratio, ``10 log10(sum(ref^2) / sum((ref - actual)^2))``, in dB.

    Computed in float64. Equal tensors give inf; noise on an all-zero reference gives -inf. A NaN anywhere
    gives NaN, which fails every ``>=`` against a floor.

    Raises:
        ValueError: if the shapes differ.
    """
    return _ratio(*_powers(actual, reference, rows=False))[0]


def worst_row_sqnr(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """The smallest :func:`sqnr` of any row [..., K], in dB; NaN if any row has it, inf without rows.

    A row of zeros in both tensors is exact (inf), so it never is the worst.

    Raises:
        ValueError: if the shapes differ or the tensors are scalars.
    """
    rows = _ratio(*_powers(actual, reference, rows=True))
    return math.nan if any(math.isnan(r) for r in rows) else min(rows, default=math.inf)


def _powers(actual: torch.Tensor, reference: torch.Tensor, rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Signal and noise power, float64, one value in all or one a row."""
    if actual.shape != reference.shape or (rows and not reference.ndim):
        raise ValueError(
            f"SQNR compares tensors of one shape (with rows); got {tuple(actual.shape)} and "
            f"{tuple(reference.shape)}: broadcasting would hide a mistake"
        )
    expected = reference.detach().double().cpu()
    noise = expected - actual.detach().double().cpu()
    if rows:
        return expected.square().sum(-1).flatten(), noise.square().sum(-1).flatten()
    return expected.square().sum().reshape(1), noise.square().sum().reshape(1)


def _ratio(signal: torch.Tensor, noise: torch.Tensor) -> list[float]:
    decibels = 10 * torch.log10(signal / noise)
    return torch.where(noise == 0, math.inf, decibels).tolist()


def outlier_matrix(
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Normal values [..., M, K] with 0.1% of the rows times 100 and 0.1% of the columns times 30.

    At least one row and one column are outliers, so that small shapes have them too. Leading dimensions
    share the places. The same ``seed`` gives the same values on every device.

    Raises:
        ValueError: for fewer than two dimensions.
    """
    if len(shape) < 2:
        raise ValueError(f"an outlier matrix has rows and columns; got shape {shape}")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    x[..., _outliers(shape[-2], generator), :] *= ROW_OUTLIER
    x[..., _outliers(shape[-1], generator)] *= COLUMN_OUTLIER
    return x.to(device=device, dtype=dtype)


def _outliers(size: int, generator: torch.Generator) -> torch.Tensor:
    count = min(size, max(1, round(size * OUTLIER_SHARE)))
    return torch.randperm(size, generator=generator)[:count]


FNUZ_DTYPES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_FACTORIES = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided")


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what ``torch.empty`` and its kin return inside the block, so that unwritten memory shows.

    Every byte becomes 0xFF: NaN in float64, float32, bfloat16, float16, e4m3fn, e5m2 and e8m0, -1 in signed
    integers, code 0xF (-6) twice in packed e2m1. The fnuz types get 0x80, their only NaN; bool becomes True.
    Covers calls from Python (``torch.empty``, ``empty_like``, ``empty_strided``, ``empty_permuted``,
    ``Tensor.new_empty``, ``new_empty_strided``) in eager mode, in every thread; meta and fake tensors have no
    memory and are left alone.
    """
    with torch.device("cpu"):
        torch.empty(0)  # PyTorch lists its factories at the first such call, once: it must find the real ones
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
            for name in names:
                stack.enter_context(_replaced(owner, name))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str) -> Iterator[None]:
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, _poisoning(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = allocate(*args, **kwargs)
        if out.device.type != "meta" and type(out) is torch.Tensor:
            storage: Any = out.untyped_storage()
            storage.fill_(_poison(out.dtype))
        return out

    return poisoned


def _poison(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    return 0x80 if dtype in FNUZ_DTYPES else 0xFF
