"""Conversion of this project's own models: the head stays, every projection of the blocks is converted."""

import pytest
import torch

import octavo
from octavo import models


@pytest.mark.parametrize("name", sorted(models.PRESETS))
def test_head_stays_and_blocks_are_converted(name):
    model = models.preset(name).build("meta")
    report = octavo.convert(model)
    assert report.skipped == ("output",)
    assert len(report.converted) == 7 * len(model.layers)
    assert len(report.spans) == len(model.layers)


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
