"""`octavo.info`: the machine's description and dispatch explained without a GPU."""

import json

import pytest
import torch

from octavo import info
from octavo.operators import wins
from octavo.operators.gemm.scaled import OTHER_SCALES


def test_info_is_json_and_names_every_kernel_with_a_reason_or_none():
    found = json.loads(json.dumps(info.info()))
    assert found["versions"]["torch"] == torch.__version__
    kernels = found["kernels"]["cpu"]
    assert set(kernels) == set(info.OPS)
    for op, verdicts in kernels.items():
        assert sum(v["chosen"] for v in verdicts) == 1, op
        assert all(v["reason"] for v in verdicts if not v["chosen"] and v["kernel"] != "reference"), op
    assert kernels["scaled_mm"][-1] == {"kernel": "reference", "reason": None, "chosen": True}


@pytest.mark.parametrize(
    ("arch", "chosen"), [("sm_90", "torch"), ("gfx942", "torch"), ("gfx950", "torch"), ("sm_80", "reference")]
)
def test_explain_answers_for_an_architecture_that_is_not_here(arch, chosen):
    verdicts = info.explain("scaled_mm", [(8192, 4096), (6144, 4096)], arch=arch)
    assert [v.kernel for v in verdicts if v.chosen] == [chosen]


def test_explain_blockwise_is_served_by_torch_on_hopper_alone():
    shapes = [(8192, 4096), (6144, 4096)]
    served = {
        a: info.explain("scaled_mm", shapes, recipe="blockwise", arch=a)[0] for a in ("sm_90", "gfx942")
    }
    assert served["sm_90"].reason is None
    assert "128-blocks are served on sm_90 alone" in (served["gfx942"].reason or "")


@pytest.mark.parametrize("op", info.OPS)
def test_explain_takes_the_shapes_it_documents(op):
    for arch in (None, "gfx950"):
        assert sum(v.chosen for v in info.explain(op, info._sample_shapes(op), arch=arch)) == 1


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (("scaled", [(4, 4)]), "unknown op 'scaled'; use one of"),
        (("scaled_mm", [(4, 4)]), "scaled_mm takes shapes MxK NxK; got 4x4"),
        (("scaled_mm", []), "got none"),
    ],
)
def test_explain_says_what_it_needs(arguments, needed):
    with pytest.raises(ValueError, match=needed):
        info.explain(*arguments)
    with pytest.raises(ValueError, match="no kernel to explain"):
        info.explain("quantize", [(4, 4)], recipe="bf16")
    with pytest.raises(ValueError, match="unknown product"):
        info.explain("quantize", [(4, 4)], product="forward")


def test_parse_shape():
    assert info.parse_shape("8192x4096") == (8192, 4096)
    with pytest.raises(ValueError, match="joined by x"):
        info.parse_shape("8192*4096")


def test_explain_says_why_an_operator_of_pytorch_stays_its_own(monkeypatch):
    box = {"format": ["rowwise"], "fast": ["true"], "m": [16, 64], "n": [4096, 4096], "k": [4096, 4096]}
    monkeypatch.setattr(
        wins, "tables", lambda arch: {"scaled_mm": wins.Table((box,), "a test"), "mm": wins.Table((), "")}
    )
    wins._decide.cache_clear()
    asked = {
        (16, "rowwise"): None,
        (17, "rowwise"): None,
        (128, "rowwise"): wins.NOT_A_WIN,
        (16, "tensorwise"): OTHER_SCALES,
        (17, "blockwise"): "1x128 scales want a multiple of 4 rows",
        (16, "blockwise"): wins.NOT_A_WIN,
        # No measurement is asked for where PyTorch has no product.
        (16, "mxfp8"): None,
    }
    for (rows, recipe), reason in asked.items():
        shapes = [(rows, 4096), (4096, 4096)]
        found = info.explain_operators("scaled_mm", shapes, recipe=recipe, arch="sm_90")
        assert found == [("aten::_scaled_mm_v2", reason)], (rows, recipe)
    assert info.explain_operators("mm", [(16, 4096), (4096, 4096)], arch="sm_90") == [
        ("aten::mm", wins.NOT_A_WIN)
    ]
    assert info.explain_operators("quantize", [(16, 4096)], arch="sm_90") == []
    wins._decide.cache_clear()


@pytest.mark.parametrize("op", info.OPS)
def test_explained_operators_are_asked_with_arguments_they_take(op):
    for overload, reason in info.explain_operators(op, info._sample_shapes(op), arch="sm_90"):
        assert overload.startswith("aten::")
        assert reason is None or "measured" in reason, (op, reason)
