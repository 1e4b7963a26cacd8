"""Which of a configuration's linear layers get which recipe.

TorchTitan hands an override's factory the node it replaces and not where that node lies. Where it lies is asked of
the override just before (``Override.matches``), once a node and in the same order; :class:`NamedOverride` keeps
the answers in a queue, so that rules can name layers by their path as everywhere else in Octavo.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import override as titan_override
from torchtitan.config.override import _REGISTRY, Override

from octavo.training.recipes import Recipe, get_recipe

LEFT_ALONE = (r"(^|\.)lm_head$", r"\.router\.gate$", r"\.gate$")
"""Paths of heads and routers, which stay in high precision unless a rule says otherwise."""


@dataclass
class NamedOverride(Override):
    """An override that remembers the paths of the nodes it claimed."""

    paths: deque[str] = field(default_factory=deque)
    applying: bool = False

    def matches(self, fqn: str) -> bool:
        """As TorchTitan's, noting the path of what matches."""
        found = super().matches(fqn)
        if found:
            if self.applying or fqn in self.paths:
                # Another configuration, or the same again after one that was refused half-way.
                self.paths.clear()
            self.applying = False
            self.paths.append(fqn)
        return found

    def next_path(self) -> str:
        """The path of the node that the factory is called for now."""
        self.applying = True
        return self.paths.popleft().removeprefix("model_spec.model.")


def named_override(**options: Any) -> Any:
    """TorchTitan's ``override`` whose factory is called as ``factory(path, config, **kwargs)``."""

    def decorate(factory: Any) -> Any:
        def with_path(config: Any, **kwargs: Any) -> Any:
            return factory(_REGISTRY[key].next_path(), config, **kwargs)  # pyright: ignore

        with_path.__name__, with_path.__module__ = factory.__name__, factory.__module__
        with_path.__doc__ = factory.__doc__
        key = f"{factory.__module__}.{factory.__name__}"
        titan_override(**options)(with_path)
        plain = _REGISTRY[key]
        _REGISTRY[key] = NamedOverride(**vars(plain))
        return with_path

    return decorate


def recipe_for(
    path: str, recipe: str | Recipe, rules: Sequence[Sequence[Any]], left_alone: Sequence[str] = LEFT_ALONE
) -> Recipe | None:
    """The recipe of the layer at ``path``: the first rule that matches, else ``recipe``, or None to leave it.

    Args:
        rules: ``[pattern, recipe]`` pairs as in :func:`octavo.convert`; a recipe of None leaves the layer alone.

    Raises:
        ValueError: for an unknown recipe, or a rule that is none.
    """
    default = get_recipe(recipe)
    for rule in rules:
        if len(rule) != 2 or not isinstance(rule[0], str):
            raise ValueError(
                f"{rule!r} is no rule: give [pattern, recipe], with a recipe of null to leave layers alone"
            )
        pattern, chosen = rule
        if re.search(pattern, path):
            return None if chosen is None else get_recipe(chosen)
    if any(re.search(pattern, path) for pattern in left_alone):
        return None
    return default
