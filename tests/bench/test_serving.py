"""serve-bench: what it generates, what it compares, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octavo import cli
from octavo.bench.serving import contenders, models, report
from octavo.bench.serving.engine import Engine, forced_logits
from octavo.bench.serving.measure import Check, Load, Timing, check, measure, prompts
from octavo.serving import QuantizedLinear

pytest.importorskip("transformers", reason="serve-bench runs transformers' models")

CPU, MODEL = torch.device("cpu"), models.find("llama3-debug-random")


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    return MODEL.build(dtype, CPU, 64)


@pytest.mark.slow
def test_generation_is_that_of_transformers() -> None:
    model = build()
    asked = prompts(Load(3, 9, 7, 1), MODEL.vocabulary, CPU)
    got = Engine(model, 3, 9, 7).generate(asked)
    expected: Any = model
    expected = expected.generate(asked, max_new_tokens=7, min_new_tokens=7, do_sample=False, pad_token_id=0)
    assert torch.equal(got.tokens, expected[:, 9:])
    assert 0 < got.first_seconds < got.total_seconds


def test_an_engine_starts_anew_with_each_batch() -> None:
    engine = Engine(build(), 2, 5, 4)
    one, two = (prompts(Load(2, 5, 4, 1), n, CPU) for n in (512, 300))
    first = engine.generate(one).tokens
    assert not torch.equal(engine.generate(two).tokens, first)
    assert torch.equal(engine.generate(one).tokens, first)


def test_forced_logits_are_those_that_chose_the_tokens() -> None:
    model = build()
    asked = prompts(Load(2, 5, 4, 1), 512, CPU)
    tokens = Engine(model, 2, 5, 4).generate(asked).tokens
    logits = forced_logits(model, torch.cat([asked, tokens], 1), 4)
    assert logits.shape == (2, 4, 512)
    assert torch.equal(logits.argmax(-1), tokens)


@pytest.mark.parametrize("form", ["mxfp8", "mxfp4", "fp8-blockwise"])
def test_octavo_agrees_with_float32_products_of_the_same_operands(form: str) -> None:
    ours = contenders.octavo(build(torch.bfloat16), form, activations=None, force=False)
    found = check(ours, contenders.reference(ours), Load(2, 8, 6, 1), 512)
    assert found.passed
    assert found.logits_db > 40


def test_a_wrong_product_fails_the_check() -> None:
    ours = contenders.octavo(build(torch.bfloat16), "mxfp8", activations=None, force=False)
    against = contenders.reference(ours)
    broken = build(torch.bfloat16)
    broken = contenders.octavo(broken, "mxfp8", activations=None, force=False)
    layer = broken.model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, QuantizedLinear)
    layer.weight_scale = layer.weight_scale.view(torch.uint8).add(1).view(torch.float8_e8m0fnu)
    found = check(broken, against, Load(2, 8, 6, 1), 512)
    assert not found.passed


def test_a_difference_within_the_error_is_no_failure() -> None:
    assert Check(40.0, (3, 8), margins_ok=True).passed
    assert not Check(40.0, (3, 8), margins_ok=False).passed
    assert not Check(34.9, (8, 8), margins_ok=True).passed


def test_decoding_first_is_undone() -> None:
    ours = contenders.octavo(build(), "mxfp8", activations=None, force=False)
    other = contenders.decoded_first(ours)
    x = torch.randn(3, 256)
    layer = ours.model.get_submodule("model.layers.0.mlp.gate_proj")
    before = layer(x)
    with other.context():
        assert not torch.equal(layer(x), before)  # 16-bit inputs there, 8-bit ones here
    assert "forward" not in vars(layer)
    assert torch.equal(layer(x), before)


def test_every_contender_is_timed_in_every_round() -> None:
    ours = contenders.octavo(build(), "bf16", activations=None, force=False)
    seen: list[str] = []
    timings = measure(
        [contenders.stock(build()), ours], Load(2, 4, 3, 2), 512, on_round=lambda c, _: seen.append(c.name)
    )
    assert seen == ["stock", "octavo"] * 2
    assert [len(t.total) for t in timings] == [2, 2]


def test_figures_follow_from_the_rounds() -> None:
    timing = Timing("octavo", "mxfp8", Load(4, 16, 11, 3), first=[0.5, 0.1, 0.2], total=[1.0, 1.2, 4.0])
    row = timing.as_data()
    assert row["requests_per_s"] == pytest.approx(4 / 1.2)
    assert row["output_tokens_per_s"] == pytest.approx(44 / 1.2)
    assert row["time_to_first_token_ms"] == pytest.approx(200)
    assert row["time_per_output_token_ms"] == pytest.approx(100)


def test_ratios_are_over_stock_and_over_the_same_weights() -> None:
    load = Load(4, 16, 11, 1)
    of = {"stock": ("bf16", 2.0), "octavo": ("mxfp8", 1.0), "decoded first": ("mxfp8", 3.0)}
    timings = [Timing(name, form, load, [0.1], [total]) for name, (form, total) in of.items()]
    rows = {row["contender"]: row for row in report.as_data("m", "c", CPU, {}, timings)["cases"]}
    assert rows["octavo"]["over_stock"] == pytest.approx(2.0)
    assert rows["octavo"]["over_decoded_first"] == pytest.approx(3.0)
    assert "over_decoded_first" not in rows["stock"]


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve-bench", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.slow
def test_command_writes_json_markdown_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--isl", "4", "--osl", "3", "--rounds", "1", "--concurrency", "1,2", "--layers", "1"]
    status = _run("--model", "llama3-debug-random", "--format", "bf16,mxfp4", *small, "--out", str(tmp_path))
    assert status == 0
    content = json.loads((tmp_path / "serving-llama3-debug-random.json").read_text())
    assert [(c["contender"], c["format"]) for c in content["cases"][:4]] == [
        ("stock", "bf16"), ("octavo", "bf16"), ("octavo", "mxfp4"), ("decoded first", "mxfp4"),
    ]  # fmt: skip
    assert {c["concurrency"] for c in content["cases"]} == {1, 2}
    assert all(found["passed"] for found in content["checks"].values())
    assert "| 2 | mxfp4 | octavo |" in (tmp_path / "serving-llama3-debug-random.md").read_text()
    assert (tmp_path / "serving-llama3-debug-random.png").stat().st_size > 10_000
    assert "written:" in capsys.readouterr().out


def test_a_checkpoint_of_transformers_is_served(tmp_path: Path) -> None:
    model: Any = build()
    model.save_pretrained(tmp_path / "checkpoint")
    served = models.find(str(tmp_path / "checkpoint"))
    loaded = served.build(torch.float32, CPU, 64)
    assert served.vocabulary == 512
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_dimensions_are_the_published_ones() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    counts = {"llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "qwen3-8b": 8.19e9, "qwen3-32b": 32.76e9}
    for name, count in counts.items():
        published = models.PUBLISHED[name]
        config = AutoConfig.for_model(published.kind, tie_word_embeddings=False, **published.config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=2e-3), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama3-8b"], "did you mean llama3-8b-random?"),
        (["--model", "{tmp}"], "has no config.json"),
        (["--model", "{tmp}/broken"], "cannot be loaded by transformers"),
        (["--format", "int4"], "choose from bf16, mxfp8, mxfp4, fp8-blockwise"),
        (["--format", ""], "--format is empty"),
        (["--concurrency", "1,many"], "give whole numbers"),
        (["--concurrency", "0"], "each at least 1"),
        (["--osl", "0"], "--osl is 0: give at least 1"),
        (["--layers", "0"], "--layers is 0"),
        (["--activations", "8-bit"], "choose from quantized, 16-bit"),
        (["--device", "tpu9"], "--device is 'tpu9'"),
        (["--out", "{tmp}/file/below"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "nothing-known"}')
    (tmp_path / "file").write_text("")
    small = ["--isl", "2", "--osl", "2", "--rounds", "1", "--concurrency", "1", "--format", "bf16"]
    first = [] if "--model" in arguments else ["--model", "llama3-debug-random"]
    assert _run(*first, *small, *(a.format(tmp=tmp_path) for a in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: ")
    assert error.count("\n") == 1
    assert words in error
