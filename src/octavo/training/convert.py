"""Conversion of a model's linear layers and experts, in place, by ordered rules, with a report of every decision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from octavo.training import experts, sizes
from octavo.training.modules import Linear
from octavo.training.recipes import Recipe, get_recipe
from octavo.training.spanning import install, remove

Rule = tuple[str, "str | Recipe | None"]
"""(regular expression searched in the module's path, recipe or None to leave it alone)."""

HEAD_NAMES = ("lm_head", "embed_out", "embed_proj", "embed_tokens", "tok_embeddings", "output_projection")
"""Last part of the path of output heads and projections of the token embedding, at any depth."""
TOP_LEVEL_HEAD_NAMES = ("output", "head", "embed", "embedding", "unembed", "classifier", "score")
"""The same for words that mean something else deeper inside a model."""
TRANSPARENT = (
    "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer", "original_module"
)  # fmt: skip
"""Parts of a path that wrappers add around a module without renaming it."""
WRAPPERS = ("model", "module", "transformer", "base_model")
"""Attributes that wrap a whole model: what lies directly under them is still top level."""
GATE_NAMES = ("gate", "router", "shared_expert_gate")
"""Last part of the path of what chooses or weighs experts, where experts stand beside it or one level up."""
PEFT_WRAPPED = ("base_layer", "base_model", "lora_model", "model", "modules_to_save", "original_module")
"""Attributes under which PEFT's modules hold the model they adapt, or copies of its layers to train in full;
all else in them is an adapter."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Decision:
    """What became of one linear layer or bank of experts: ``recipe`` is None where it was left alone.

    ``shape`` is [N, K], of experts [E, F, D] or, with gate and up in one weight, [E, 2 F, D].
    """

    name: str
    shape: tuple[int, ...]
    recipe: str | None
    reason: str


@dataclass(frozen=True)
class ConvertReport:
    """Every linear layer and bank of experts with what was done and why; prints as a table."""

    decisions: tuple[Decision, ...]
    unmatched_rules: tuple[str, ...] = field(default=())
    spans: tuple[str, ...] = field(default=())
    """Paths of the MLPs whose three projections run as one Function."""

    @property
    def converted(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.decisions if d.recipe is not None)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.decisions if d.recipe is None)

    def __str__(self) -> str:
        rows = [("module", "shape [N, K]", "recipe", "reason")]
        rows += [(d.name or "(root)", str(list(d.shape)), d.recipe or "-", d.reason) for d in self.decisions]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines += [f"{name}: its projections run as one function" for name in self.spans]
        lines += [f"rule {rule!r} matched no linear layer or experts" for rule in self.unmatched_rules]
        return "\n".join([*lines, f"{len(self.converted)} converted, {len(self.skipped)} left alone"])


def convert(
    model: nn.Module,
    recipe: str | Recipe = "rowwise",
    *,
    rules: Sequence[Rule] = (),
    min_size: int | None = None,
    spans: bool = True,
) -> ConvertReport:
    """Make the model's linear layers and experts train in 8 bits, in place.

    Each ``nn.Linear`` becomes an :class:`octavo.Linear`, which is an ``nn.Linear`` with the same parameters
    (the very tensors: tied, frozen and meta ones stay so), state-dict keys, hooks and device. By default the
    output head and the token embedding's projection stay in high precision, by name or because a dimension
    is the vocabulary size, and so do PEFT's adapters and what chooses or weighs experts.

    Experts are :class:`octavo.GroupedExperts` and those of transformers that hold SwiGLU weights stacked as
    ``gate_up_proj`` and ``down_proj`` (Mixtral, Qwen-MoE, DeepSeek and their kin); they run as one Function each
    and keep class name, parameters and state dict.

    Args:
        model: any module, also on the meta device.
        recipe: for layers that no rule names.
        rules: ``(pattern, recipe)`` pairs, tried in order, first match wins; the pattern is searched in the
            module's path, recipe None leaves the layer alone. A rule overrides the defaults. It names an
            adapter of PEFT only if it matches the adapter's part of the path (``lora_A``): ``q_proj`` means the
            layer that is adapted.
        min_size: leave layers alone whose smaller dimension is below this. By default, layers of a size at which
            the recipe was measured slower on the GPU that holds them (:mod:`octavo.training.sizes`); 0 converts
            layers of any size.
        spans: also run the SwiGLU MLPs of :data:`octavo.training.spanning.MLPS` as one Function each.

    Returns:
        A report of what was converted, what was left alone and why, and which rules matched nothing.

    Raises:
        ValueError: for an unknown recipe or a bad pattern (the model is untouched), or if no layer was
            converted; the message says why for each.
    """
    default, compiled = get_recipe(recipe), [_compile(rule) for rule in rules]
    kept, adapters = _kept(model), _adapters(model)
    used: set[int] = set()
    decisions, changes = [], []
    for name, module in (*_linears(model), *experts.convertible(model)):
        start = adapters.get(name, 0)
        index = next((i for i, (pattern, _) in enumerate(compiled) if _names(pattern, name, start)), None)
        if index is not None:
            used.add(index)
        chosen = default if index is None else compiled[index][1]
        reason, shape = _judge(name, module, kept, min_size, index is not None, chosen)
        if reason is None and index is None and name in adapters:
            reason = "adapter of PEFT, which trains in high precision"
        if reason is None:
            assert chosen is not None
            changes.append((module, chosen))
            by = "default" if index is None else f"rule {compiled[index][0].pattern!r}"
            decisions.append(Decision(name, shape, chosen.name, by))
        else:
            decisions.append(Decision(name, shape, None, reason))
    unmatched = tuple(p.pattern for i, (p, _) in enumerate(compiled) if i not in used)
    report = ConvertReport(tuple(decisions), unmatched)
    if not changes:
        why = "every layer was left alone" if decisions else "the model has no nn.Linear and no experts"
        raise ValueError(
            f"nothing was converted: {why}; give rules=[(pattern, recipe), ...] that name the layers to convert\n"
            f"{report}"
        )
    for module, chosen in changes:
        _apply(module, chosen)
    remove(model)
    return replace(report, spans=tuple(install(model))) if spans else report


def _judge(
    name: str,
    module: nn.Module,
    kept: dict[int, str],
    min_size: int | None,
    by_rule: bool,
    recipe: Recipe | None,
) -> tuple[str | None, tuple[int, ...]]:
    """Why a linear layer or a bank of experts is left alone, or None, and its shape."""
    if isinstance(module, nn.Linear):
        return _why_left_alone(name, module, kept, min_size, by_rule, recipe), _shape(module)
    shape = tuple(experts.gate_weight(module).shape)
    return _why_experts_left_alone(module, min_size, by_rule, recipe), shape


def _apply(module: nn.Module, recipe: Recipe) -> None:
    if isinstance(module, nn.Linear):
        module.__class__ = Linear
        module.recipe = recipe  # pyright: ignore
    else:
        experts.install(module, recipe)


def left_alone_by_default(model: nn.Module) -> dict[str, str]:
    """Names of the linear layers that ``convert`` would leave alone without rules, and why."""
    kept, adapters, any_recipe = _kept(model), _adapters(model), get_recipe("rowwise")
    reasons = {name: _why_left_alone(name, m, kept, 0, False, any_recipe) for name, m in _linears(model)}
    found = {name: reason for name, reason in reasons.items() if reason is not None}
    return found | dict.fromkeys(adapters, "adapter of PEFT")


def _compile(rule: Rule) -> tuple[re.Pattern[str], Recipe | None]:
    if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)):
        raise ValueError(
            f"{rule!r} is no rule: give (pattern, recipe), with recipe None to leave layers alone"
        )
    pattern, recipe = rule
    try:
        return re.compile(pattern), None if recipe is None else get_recipe(recipe)
    except re.error as error:
        raise ValueError(f"rule pattern {pattern!r} is no regular expression: {error}") from error


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _names(pattern: re.Pattern[str], name: str, start: int) -> bool:
    """Whether the pattern matches the path, beyond character ``start``."""
    return any(match.end() > start or not start for match in pattern.finditer(name))


def _adapters(model: nn.Module) -> dict[str, int]:
    """Linear layers that PEFT added, each with where in its path the adapter's part begins."""
    modules, found = dict(model.named_modules()), {}
    for name, _ in _linears(model):
        path = ""
        for part in name.split(".") if name else ():
            if type(modules[path]).__module__.startswith("peft.") and part not in PEFT_WRAPPED:
                found[name] = len(path) + 1
                break
            path = f"{path}.{part}" if path else part
    return found


def _shape(module: nn.Linear) -> tuple[int, ...]:
    return (module.out_features, module.in_features)


def _kept(model: nn.Module) -> dict[int, str]:
    """Ids of the linear layers that stay in high precision for what they do in this model, and why."""
    heads = "output head or embedding projection, by the embedding's weight or vocabulary size"
    gates = "chooses or weighs experts, by name beside experts"
    return dict.fromkeys(_gates(model), gates) | dict.fromkeys(_heads(model), heads)


def _gates(model: nn.Module) -> set[int]:
    """Ids of the linear layers called as a gate in a module that holds experts, or in a part of one."""
    modules = dict(model.named_modules())
    found = set()
    for name, module in _linears(model):
        *path, last = [part for part in name.split(".") if part not in TRANSPARENT]
        above = (modules.get(".".join(path[:n])) for n in (len(path), len(path) - 1) if n >= 0)
        if last in GATE_NAMES and any("experts" in getattr(m, "_modules", ()) for m in above):
            found.add(id(module))
    return found


def _heads(model: nn.Module) -> set[int]:
    """Ids of the linear layers that are heads or projections of a token embedding, seen by its table.

    Such a layer shares the table's weight, or has its shape [V, D] or [D, V] as no other layer has: the
    repeated layers of a model's blocks may have a vocabulary's size by chance. Tables of positions, token
    types and segments are no vocabularies.
    """
    tables = [
        m for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and not re.search(r"pos|type|segment", name.lower())
    ]  # fmt: skip
    weights = {id(t.weight) for t in tables}
    layers = [m for _, m in _linears(model)]
    found = {id(m) for m in layers if id(m.weight) in weights}
    for table in tables:
        v, d = table.num_embeddings, table.embedding_dim
        alike = [m for m in layers if _shape(m) in ((v, d), (d, v))] if v != d else []
        # A vocabulary far wider than any MLP is one however many heads read it.
        if len(alike) == 1 or v > 8 * d:
            found |= {id(m) for m in alike}
    return found


def _why_left_alone(
    name: str,
    module: nn.Linear,
    kept: dict[int, str],
    min_size: int | None,
    by_rule: bool,
    recipe: Recipe | None,
) -> str | None:
    if recipe is None:
        return "a rule leaves it alone"
    kind = type(module)
    if kind not in (nn.Linear, Linear):
        return f"{kind.__name__} is a subclass with behaviour of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which conversion would not reach"
    if module.weight.dtype not in DTYPES:
        return f"weights of {module.weight.dtype} are not quantized"
    if by_rule:
        return None
    plain = re.sub(r"\.modules_to_save\.[^.]+$", "", name)  # PEFT's copy of a layer, by adapter
    parts = [part for part in plain.split(".") if part not in TRANSPARENT] or [""]
    top_level = all(part in WRAPPERS for part in parts[:-1])
    if parts[-1] in HEAD_NAMES or (top_level and parts[-1] in TOP_LEVEL_HEAD_NAMES):
        return "output head or embedding projection, by name"
    if id(module) in kept:
        return kept[id(module)]
    return _why_too_small(module.weight, min_size, recipe)


def _why_too_small(weight: torch.Tensor, min_size: int | None, recipe: Recipe) -> str | None:
    if min_size is None:
        return sizes.why_too_small(tuple(weight.shape), recipe.name, weight.device)
    return f"smaller than min_size={min_size}" if min(weight.shape[-2:]) < min_size else None


def _why_experts_left_alone(
    bank: nn.Module, min_size: int | None, by_rule: bool, recipe: Recipe | None
) -> str | None:
    if recipe is None:
        return "a rule leaves it alone"
    reason = experts.why_not(bank)
    if reason is not None:
        return reason
    weight = experts.gate_weight(bank)
    if weight.dtype not in DTYPES:
        return f"weights of {weight.dtype} are not quantized"
    return None if by_rule else _why_too_small(weight, min_size, recipe)
