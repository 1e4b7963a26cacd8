"""Octavo in TorchTitan, by TorchTitan's own seam: name these functions in ``--override.imports``.

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports octavo.integrations.torchtitan.linear octavo.integrations.torchtitan.experts

``linear`` and ``experts`` take a recipe and rules, as JSON behind the name:
``'octavo.integrations.torchtitan.linear={"recipe": "blockwise", "rules": [["layers.0.", null]]}'``. ``metrics``
makes TorchTitan's MFU count 8-bit products at their own peak, and ``selective_ac`` makes selective activation
checkpointing keep the outputs of scaled products as it keeps those of others. Ready configurations with all four are in
``--module octavo.integrations.torchtitan``, e.g. ``--config llama3_8b_rowwise``.
"""

from octavo.integrations.torchtitan import versions

versions.check()

from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402

from octavo.integrations.torchtitan.modules import OctavoLinear, experts_class  # noqa: E402
from octavo.integrations.torchtitan.rules import named_override, recipe_for  # noqa: E402
from octavo.integrations.torchtitan.training import OctavoMetrics, OctavoSelectiveAC  # noqa: E402


@named_override(target=Linear.Config, exact=True, description="linear layers by an Octavo recipe")
def linear(
    path: str,
    config: Any,
    recipe: str = "rowwise",
    rules: Sequence[Sequence[Any]] = (),
    gather_8_bits: bool = False,
) -> Any:
    """Linear layers by ``recipe``, except heads, routers and what ``rules`` leave alone.

    With ``gather_8_bits`` FSDP2 gathers weights as :func:`octavo.prepare_fsdp` says, where the backend shards
    layer by layer (spmd_types, TorchTitan's default, and full_dtensor).
    """
    chosen = recipe_for(path, recipe, rules)
    if chosen is None:
        return config
    return derive(config, OctavoLinear.Config, recipe=chosen, gather_path=path if gather_8_bits else "")


@named_override(target=GroupedExperts.Config, description="grouped experts by an Octavo recipe")
def experts(
    path: str,
    config: Any,
    recipe: str = "rowwise",
    rules: Sequence[Sequence[Any]] = (),
    gather_8_bits: bool = False,
) -> Any:
    """Grouped experts by ``recipe``, except what ``rules`` leave alone; ``gather_8_bits`` as in :func:`linear`."""
    chosen = recipe_for(path, recipe, rules)
    if chosen is None:
        return config
    kind = experts_class(type(config)._owner).Config
    return derive(config, kind, recipe=chosen, gather_path=path if gather_8_bits else "")


@override(target=MetricsProcessor.Config, description="MFU that knows 8-bit products")
def metrics(config: Any) -> Any:
    """MFU against a peak in which each product counts at the rate of its own precision."""
    return derive(config, OctavoMetrics.Config)


@override(
    target=SelectiveAC.Config, exact=True, description="selective checkpointing that knows 8-bit products"
)
def selective_ac(config: Any) -> Any:
    """Selective activation checkpointing that keeps outputs of scaled products."""
    return derive(config, OctavoSelectiveAC.Config)
