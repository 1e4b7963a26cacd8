"""Conversion of this project's own models: the head stays, every projection of the blocks is converted."""

import pytest
import torch
from torch import nn

import octavo
from octavo import models


@pytest.mark.parametrize("name", sorted(models.PRESETS))
def test_head_stays_and_blocks_are_converted(name):
    model = models.preset(name).build("meta")
    kinds = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | octavo.GroupedExperts)}
    feed_forwards = [n for n, m in model.named_modules() if type(m).__name__ == "FeedForward"]
    report = octavo.convert(model)
    # Whatever multiplies a token but the head and the routers' projections, experts among it.
    expected = {n for n in kinds if n != "output" and not n.endswith(".router.gate")}
    assert set(report.converted) == expected
    assert len(expected) >= 7 * len(model.layers)
    assert set(report.skipped) == set(kinds) - expected
    assert sorted(report.spans) == sorted(feed_forwards)


def test_debug_model_trains_alike_by_spans_and_by_layers():
    from octavo.testing import sqnr

    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for spans in (True, False):
        model = models.preset("llama3-debug").build()
        model.init_weights(0)
        octavo.convert(model, spans=spans)
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.layers[0].feed_forward.w1.weight.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert sqnr(*gradients) > 15
