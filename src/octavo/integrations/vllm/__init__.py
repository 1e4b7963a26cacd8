"""Octavo in vLLM, as a plugin that vLLM finds by itself (entry point ``octavo`` of ``vllm.general_plugins``).

    vllm serve MODEL --quantization octavo_mxfp8

quantizes a 16-bit checkpoint's linear layers while it loads; ``octavo_mxfp4`` and ``octavo_fp8_blockwise`` too. The
plugin also switches ``octavo.operators`` on and puts vLLM's RMSNorm on PyTorch's fused operator, where it has no
residual and vLLM is told to run its norm class at all (``--compilation-config '{"custom_ops": ["+rms_norm"]}'``).
``$VLLM_PLUGINS`` without ``octavo`` leaves all of this out, ``$OCTAVO_VLLM=operators,norm,quantization`` chooses parts.

Written for vLLM 0.22; tried on stand-ins of its interfaces, not yet in a vLLM that serves.
"""

from __future__ import annotations

import logging
import os

from octavo.errors import UserError

ENVIRONMENT = "OCTAVO_VLLM"
PARTS = ("operators", "norm", "quantization")

logger = logging.getLogger(
    "vllm.octavo"
)  # below vLLM's own logger, so that it is shown as vLLM shows its lines

_registered: set[str] = set()


def register() -> None:
    """What vLLM calls in each of its processes, possibly several times: adds what ``$OCTAVO_VLLM`` names, or all.

    A vLLM that lacks what a part needs gets one warning and runs without that part.

    Raises:
        UserError: ``$OCTAVO_VLLM`` names something that is none of ``PARTS``.
    """
    for part in _chosen():
        if part in _registered:
            continue
        try:
            _PARTS[part]()
        except (ImportError, AttributeError) as error:
            logger.warning("octavo: %s left out, this vLLM does not have what it needs: %s", part, error)
        else:
            _registered.add(part)


def _chosen() -> tuple[str, ...]:
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        return PARTS
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise UserError(f"${ENVIRONMENT} names {unknown[0]!r}: choose from {', '.join(PARTS)}")
    return names


def _operators() -> None:
    from octavo import operators

    operators.enable()


def _norm() -> None:
    from octavo.integrations.vllm import norm

    norm.register()


def _quantization() -> None:
    from octavo.integrations.vllm import quantization

    quantization.register()


_PARTS = {"operators": _operators, "norm": _norm, "quantization": _quantization}
