"""Dense products under torch.compile: what is offered to Inductor, and the kernels that its graphs call.

Inductor lowers ``mm`` and ``addmm`` to choices. With ``max_autotune`` it times them, and ours is one more of them, for
every product that the kernels are right for: PyTorch's own stays a candidate. Without, there is no timing, so ours
stands in place of PyTorch's only where a table of wins says so (or under ``enable(force=True)``); where the number of
rows is not known while compiling, the table is asked for it at run time.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import threading
from pathlib import Path

import torch

from octavo import hardware
from octavo._version import __version__
from octavo.operators import inductor, wins
from octavo.operators.gemm import dense
from octavo.operators.gemm import plan as plans
from octavo.operators.inductor import Answer, Product
from octavo.quantize.launch_tables import overlay_folder

_enabled = False
_forced = False
_lock = threading.Lock()
_offered: collections.Counter[str] = collections.Counter()
_refused: dict[str, collections.Counter[str]] = {"mm": collections.Counter(), "addmm": collections.Counter()}


# ---- kernels ----------------------------------------------------------------------------------------------------


def _row(bias: torch.Tensor | None) -> torch.Tensor | None:
    """One value a column; Inductor hands a bias over expanded to the result's shape when it times choices."""
    return bias[0] if bias is not None and bias.ndim == 2 and bias.stride(0) == 0 else bias


def _why_not(a: torch.Tensor, mat2: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> str | None:
    if not _enabled:
        return "the operator is disabled"
    if out.dtype is not a.dtype or out.ndim != 2 or out.stride(1) != 1 or out.stride(0) < out.shape[1]:
        return "out's rows are not contiguous"
    return dense.why_not_mm(a, mat2) if bias is None else dense.why_not_addmm(bias, a, mat2)


def _into(
    a: torch.Tensor, mat2: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, measured: bool
) -> torch.Tensor:
    row = _row(bias)
    # Asked again at run time: layouts may have changed since, and the operator may be off.
    reason = _why_not(a, mat2, row, out)
    if reason is None and measured:
        reason = dense.measured_mm(a, mat2)
    if reason is None:
        from octavo.operators.gemm import launch

        plan = plans.choose(hardware.architecture(a.device), plans.DENSE, a.shape[0])
        return launch.product(a, mat2.t(), row, out, plan)
    return torch.mm(a, mat2, out=out) if bias is None else torch.addmm(bias, a, mat2, out=out)


def octavo_mm(a: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """``torch.mm(a, mat2, out=out)`` by our kernel wherever it can."""
    return _into(a, mat2, None, out, measured=False)


def octavo_addmm(
    bias: torch.Tensor, a: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """``torch.addmm(bias, a, mat2, out=out)`` by our kernel wherever it can."""
    return _into(a, mat2, bias, out, measured=False)


def octavo_measured_mm(a: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """``torch.mm(a, mat2, out=out)`` by our kernel where a table of wins says so of these rows."""
    return _into(a, mat2, None, out, measured=True)


def octavo_measured_addmm(
    bias: torch.Tensor, a: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """``torch.addmm(bias, a, mat2, out=out)`` by our kernel where a table of wins says so of these rows."""
    return _into(a, mat2, bias, out, measured=True)


KERNELS = {
    kernel.__name__: kernel for kernel in (octavo_mm, octavo_addmm, octavo_measured_mm, octavo_measured_addmm)
}


# ---- what is offered --------------------------------------------------------------------------------------------


def why_not(product: Product) -> str | None:
    """Why the kernels are not right for a product as far as is known while compiling, or None."""
    if product.blocked is not None:
        return product.blocked
    if product.dtype not in dense.DTYPES:
        return "the operands and the result are not all bfloat16 or all float16"
    m, n, k = product.sizes
    if n is None or k is None:
        return "N or K is not known while compiling"
    if 0 in (m, n, k):
        return "an extent is zero"
    if product.scalars != (1, 1):
        return "beta or alpha is not 1"
    (am, ak), (bk, bn) = product.strides
    if ak != 1 or bk != 1:
        return "the first operand is not row-major or the second not column-major"
    if any(stride is None or stride % 8 or stride < k for stride in (am, bn)):
        return "rows do not start at multiples of 16 bytes"
    return hardware.why_no_triton(product.device)


def decide(product: Product) -> Answer:
    """What is offered for a product, or why nothing is; counted for ``operators.status``."""
    answer = _decide(product)
    with _lock:
        if answer.reason is None:
            _offered[product.operator] += 1
        else:
            _refused[product.operator][answer.reason] += 1
    return answer


def _decide(product: Product) -> Answer:
    reason = why_not(product)
    if reason is not None:
        return Answer(reason=reason)
    if product.tuned or _forced:
        return Answer(f"octavo_{product.operator}", alone=not product.tuned)
    m, n, k = product.sizes
    assert n is not None
    assert k is not None
    dtype = str(product.dtype)[6:]
    if m is not None:
        reason = wins.why_not("mm", product.device, dtype=dtype, m=m, n=n, k=k)
        return Answer(reason=reason) if reason else Answer(f"octavo_{product.operator}", alone=True)
    table = wins.tables(hardware.architecture(product.device)).get("mm")
    if table is None or not any(_speaks_of(box, dtype, n, k) for box in table.boxes):
        return Answer(reason=wins.NOT_A_WIN)
    return Answer(f"octavo_measured_{product.operator}", alone=True)


def _speaks_of(box: dict[str, list], dtype: str, n: int, k: int) -> bool:
    return dtype in box["dtype"] and box["n"][0] <= n <= box["n"][1] and box["k"][0] <= k <= box["k"][1]


# ---- the switch -------------------------------------------------------------------------------------------------


@functools.cache
def _sources() -> str:
    """A digest of the kernels and of what launches them."""
    here = Path(__file__).parent
    folders = (here, here.parents[1] / "matmul", here.parents[1] / "matmul" / "tables")
    files = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".py", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def key(forced: bool) -> str:
    """What a compiled graph with our choices depends on: version, kernels, plans, tables of wins and ``force``."""
    tables = [*wins.COMMITTED.glob("*.json"), *wins.overlay_folder().glob("*.json")]
    own = overlay_folder().glob("gemm-*.json")
    found = "".join(path.read_text() for path in sorted((*tables, *own)))
    digest = hashlib.sha256((_sources() + found).encode()).hexdigest()[:16]
    return f"octavo {__version__} {digest}{' forced' if forced else ''}"


def turned(enabled: bool, forced: bool) -> None:
    """Follow the switch of the operator ``gemm``."""
    global _enabled, _forced
    _enabled, _forced = enabled, forced
    reason = inductor.why_no_choices()
    if reason is not None:
        if enabled:
            with _lock:
                _refused["mm"][reason] += 1
        return
    inductor.register_products(KERNELS, f"{__version__} {_sources()}")
    inductor.offer_products(decide if enabled else None, key(forced))


def counted() -> dict[str, tuple[int, dict[str, int]]]:
    """(products offered, those not by reason) of each operator, for ``operators.status``."""
    with _lock:
        return {f"inductor::{name}": (_offered[name], dict(refused)) for name, refused in _refused.items()}


def reset() -> None:
    """Start the counts again."""
    with _lock:
        _offered.clear()
        for refused in _refused.values():
            refused.clear()
