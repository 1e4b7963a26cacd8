"""RMSNorm modules that do not call ``F.rms_norm``, such as those of Hugging Face transformers: made to, on request.

transformers writes its norm out in elementary operators, which no override of PyTorch's fused operator can see. Nothing
changes such a model unless ``fuse_rms_norms`` is called on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_PROBE_TOLERANCE = 2e-6
"""Relative: both sides compute in float32 and differ in the order of a sum and of two products."""


def _eps(module: torch.nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPS_NAMES)
    return next((value for value in found if isinstance(value, float)), None)


def _why_not(module: torch.nn.Module) -> str | None:
    """Why a module is no plain RMSNorm over its last dimension: asked of its parameters, then of its own result."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.ndim != 1 or len(list(module.parameters())) != 1:
        return "its parameters are not one weight of one dimension"
    eps = _eps(module)
    if eps is None:
        return f"it has no number called {', '.join(_EPS_NAMES)}"
    if "forward" in vars(module):
        return "its forward was replaced"
    if weight.is_meta:
        return "its weight is on the meta device, so that its result cannot be compared"
    n = weight.numel()
    # Float32, spread over magnitudes, with a weight unlike 1 and a row in which eps matters.
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, n, generator=generator) * torch.tensor([[1.0], [30.0], [1e-3], [0.0]])).to(
        weight.device
    )
    probe = torch.randn(n, generator=generator).to(weight.device)
    try:
        with torch.no_grad():
            got = torch.func.functional_call(module, {"weight": probe}, (x,))
            # Written out, so that a probe is no call of the operator and appears in no count of it.
            expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * probe
    except (TypeError, RuntimeError) as error:
        return f"it cannot be called with one tensor: {error}"
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return "its result is not one tensor like its input"
    difference = (got - expected).norm(dim=-1)
    if bool((difference > _PROBE_TOLERANCE * expected.norm(dim=-1)).any()):
        return "its result is not that of F.rms_norm (1 + weight, another eps, or another formula)"
    return None


def _fused(module: torch.nn.Module, original: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    if not isinstance(x, torch.Tensor) or x.dtype != weight.dtype:
        # PyTorch's fused operator serves one dtype, and the module's own result may have the wider one.
        return original(x)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, _eps(module))


@contextlib.contextmanager
def fuse_rms_norms(model: torch.nn.Module) -> Iterator[dict[str, str]]:
    """Inside the block, the model's RMSNorm modules compute by ``F.rms_norm``, which Octavo's operators can serve.

    Modules are found by a class name that ends in ``RMSNorm`` and are changed only if, on a float32 probe, their result
    is that of ``F.rms_norm`` to 2e-6. In float32 the two differ by rounding alone. In bfloat16 or float16 transformers
    rounds before it multiplies by the weight and ``F.rms_norm`` rounds once, after it: results differ by at most two
    units in the last place, and the fused ones are the nearer. ``torch.nn.RMSNorm`` needs none of this.

    Args:
        model: any module; parameters, state-dict keys and hooks stay as they are.

    Yields:
        The modules left alone, by name, with the reason.
    """
    changed: list[torch.nn.Module] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("RMSNorm") or isinstance(module, torch.nn.RMSNorm):
            continue
        reason = _why_not(module)
        if reason is None:
            module.forward = functools.partial(_fused, module, module.forward)
            changed.append(module)
        else:
            left[name] = reason
    try:
        yield left
    finally:
        for module in changed:
            del module.forward
