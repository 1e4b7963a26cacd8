"""The Llama 3 model: published sizes, names, and its arithmetic against references written by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from octavo import models
from octavo.models.llama3 import Llama3, Llama3Config, RopeScaling, apply_rope, rope_frequencies, rope_table

TINY = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=19, max_seq_len=16)


def tiny(seed: int = 0, **changes: object) -> Llama3:
    model = dataclasses.replace(TINY, **changes).build()  # type: ignore[arg-type]
    model.init_weights(seed)
    return model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-debug", 4_852_992),
        ("llama3-100m", 100_092_672),
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    model = models.preset(name).build("meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_every_preset_is_covered_above() -> None:
    names = [name for name in models.names() if name.startswith("llama3")]
    assert names == ["llama3-debug", "llama3-100m", "llama3-1b", "llama3-8b", "llama3-70b"]


def test_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'llama4': choose one of llama3-debug, llama3-100m"):
        models.preset("llama4")


def test_parameter_names_are_those_of_meta_and_torchtitan() -> None:
    layer = (
        "attention.wq attention.wk attention.wv attention.wo feed_forward.w1 feed_forward.w2 feed_forward.w3 "
        "attention_norm ffn_norm"
    )
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in layer.split()}
    expected |= {"tok_embeddings.weight", "norm.weight", "output.weight"}
    assert set(tiny().state_dict()) == expected


def test_dense_products_are_plain_linears_without_bias() -> None:
    linears = [m for m in tiny().modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 2 * 7 + 1
    assert all(type(m) is nn.Linear and m.bias is None for m in linears)


def test_tied_embeddings_are_one_parameter() -> None:
    model = tiny(tied_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    untied = sum(p.numel() for p in tiny().parameters())
    assert sum(p.numel() for p in model.parameters()) == untied - 19 * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_heads 5"),
        ({"n_heads": 32}, "even head width"),
        ({"n_kv_heads": 3}, "multiple of n_kv"),
    ],
)
def test_heads_that_do_not_divide_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


def test_a_sequence_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens but the model takes 16"):
        tiny()(torch.zeros(1, 17, dtype=torch.int64))


# --- rotary position embeddings
# ---------------------------------------------------------------------------------


def test_rope_is_multiplication_by_a_complex_rotation() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 3, 8)
    cos, sin = rope_table(TINY, 16, torch.device("cpu"))
    pairs = torch.view_as_complex(x.double().unflatten(-1, (4, 2)))
    position = torch.arange(16, dtype=torch.float64)[:, None, None]
    angle = position * 500_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    expected = torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(-2)
    torch.testing.assert_close(apply_rope(x, cos, sin).double(), expected, rtol=0, atol=2e-6)


def test_rope_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8).expand(1, 16, 1, 8), torch.randn(8).expand(1, 16, 1, 8)
    cos, sin = rope_table(TINY, 16, torch.device("cpu"))
    scores = (apply_rope(q, cos, sin)[0, :, 0] @ apply_rope(k, cos, sin)[0, :, 0].T).double()
    for distance in range(16):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores[:, 0].std() > 1e-3  # and they do depend on it


def test_rope_in_bfloat16_is_rounded_only_at_the_end() -> None:
    x = torch.randn(1, 16, 2, 8).bfloat16()
    cos, sin = rope_table(TINY, 16, torch.device("cpu"))
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())


def test_rope_scaling_has_the_three_ranges_of_llama_3_1() -> None:
    scaling = RopeScaling(factor=8.0)
    config = dataclasses.replace(TINY, dim=512, rope_scaling=scaling)
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None)).tolist()
    scaled = rope_frequencies(config).tolist()
    seen = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected, kind = before, "kept"
        elif wavelength > 8192 / 1:
            expected, kind = before / 8, "stretched"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, kind = (1 - smooth) * before / 8 + smooth * before, "between"
        seen.add(kind)
        assert after == pytest.approx(expected, rel=1e-5)
    assert seen == {"kept", "stretched", "between"}


# --- the whole model
# --------------------------------------------------------------------------------------------


def reference_logits(
    weights: dict[str, torch.Tensor], tokens: list[int], config: Llama3Config
) -> torch.Tensor:
    """Llama 3 for one sequence in float64: loops over heads and positions, and no fused operator."""
    w = {name: value.double() for name, value in weights.items()}
    head, group = config.head_dim, config.n_heads // config.n_kv_heads

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weight

    def rotate(vector: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty_like(vector)
        for i in range(0, head, 2):
            angle = position * config.rope_theta ** (-i / head)
            out[i] = vector[i] * math.cos(angle) - vector[i + 1] * math.sin(angle)
            out[i + 1] = vector[i] * math.sin(angle) + vector[i + 1] * math.cos(angle)
        return out

    x = w["tok_embeddings.weight"][tokens]
    for n in range(config.n_layers):
        p = f"layers.{n}."
        h = norm(x, w[p + "attention_norm.weight"])
        q, k, v = (h @ w[f"{p}attention.{m}.weight"].T for m in ("wq", "wk", "wv"))
        rows = []
        for t in range(len(tokens)):
            heads = []
            for i in range(config.n_heads):
                own, shared = (
                    slice(i * head, (i + 1) * head),
                    slice(i // group * head, (i // group + 1) * head),
                )
                query = rotate(q[t, own], t)
                scores = torch.stack([query @ rotate(k[s, shared], s) for s in range(t + 1)]) / math.sqrt(
                    head
                )
                heads.append(scores.softmax(0) @ v[: t + 1, shared])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ w[p + "attention.wo.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate = h @ w[p + "feed_forward.w1.weight"].T
        hidden = gate / (1 + torch.exp(-gate)) * (h @ w[p + "feed_forward.w3.weight"].T)
        x = x + hidden @ w[p + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


def test_logits_match_the_reference_in_float64() -> None:
    model = tiny()
    with torch.no_grad():  # large weights, so that attention is far from uniform and norms from one
        for name, weight in model.named_parameters():
            weight.mul_(torch.rand_like(weight) + 0.5 if "norm" in name else 12.0)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = reference_logits(model.state_dict(), tokens, TINY)
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(model(torch.tensor([tokens]))[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_token_changes_no_earlier_logits() -> None:
    model = tiny()
    tokens = torch.randint(0, 19, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 19
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


# --- initial weights
# --------------------------------------------------------------------------------------------


def test_initial_weights_follow_the_seed() -> None:
    first, again, other = tiny(1).state_dict(), tiny(1).state_dict(), tiny(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


def test_initial_weights_do_not_depend_on_the_default_device() -> None:
    model = TINY.build()
    with torch.device("meta"):
        model.init_weights(1)
    expected = tiny(1).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_tied_weights_are_one_again_after_memory_was_given() -> None:
    config = dataclasses.replace(TINY, tied_embeddings=True)
    model = config.build("meta").to_empty(device="cpu")
    model.init_weights(1)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, tiny(1, tied_embeddings=True).output.weight)


def test_initial_weights_do_not_move_the_global_generator() -> None:
    model = TINY.build()
    before = torch.get_rng_state()
    model.init_weights(1)
    assert torch.equal(before, torch.get_rng_state())


def test_initial_weights_have_the_stated_spread_and_the_loss_of_a_guess() -> None:
    config = models.preset("llama3-debug")
    model = config.build()
    model.init_weights(0)
    # A normal cut at three deviations spreads 0.9866 times as wide.
    assert model.tok_embeddings.weight.std().item() == pytest.approx(0.9866, rel=0.02)
    assert model.layers[0].attention.wq.weight.std().item() == pytest.approx(0.9866 * 0.02, rel=0.02)  # type: ignore
    assert model.layers[5].feed_forward.w2.weight.std().item() == pytest.approx(  # type: ignore[union-attr]
        0.9866 * 0.02 / math.sqrt(12), rel=0.02
    )
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.03)


def test_a_tied_embedding_starts_as_small_as_an_output_head() -> None:
    assert 0.015 < tiny(tied_embeddings=True).tok_embeddings.weight.std().item() < 0.025


def test_bfloat16_model_gives_bfloat16_logits_near_those_of_float32() -> None:
    exact, short = TINY.build(), TINY.build(dtype=torch.bfloat16)
    exact.init_weights(0)
    short.init_weights(0)
    tokens = torch.randint(0, 19, (2, 12))
    logits = short(tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact(tokens)).norm() / exact(tokens).norm() < 0.03
