"""DeepSeek's models: published sizes, and their arithmetic against references written out in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import models
from octavo.models.deepseek import PRESETS, DeepSeek, DeepSeekConfig
from octavo.models.latent_attention import LatentConfig, YarnScaling, yarn_frequencies, yarn_table
from octavo.models.llama3 import FeedForward
from octavo.models.mixture import MixtureConfig, MixtureOfExperts, Router, balance

SOFTMAX = MixtureConfig(experts=6, active=2, ffn_dim=20, shared=2)
SIGMOID = MixtureConfig(
    experts=12,
    active=3,
    ffn_dim=20,
    shared=1,
    score="sigmoid",
    groups=4,
    active_groups=2,
    normalized=True,
    scale=2.5,
    balance_rate=0.01,
)
TINY = DeepSeekConfig(
    dim=32,
    n_layers=3,
    n_heads=4,
    ffn_dim=48,
    dense_layers=1,
    mixture=SIGMOID,
    latent=LatentConfig(q_rank=20, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=6),
    vocab_size=19,
    max_seq_len=16,
    initial_std=0.1,
)
MOE_16B = dataclasses.replace(TINY, mixture=SOFTMAX, latent=None)


def tiny(config: DeepSeekConfig = TINY, seed: int = 0) -> DeepSeek:
    model = config.build()
    model.init_weights(seed)
    return model


def router(config: MixtureConfig, dim: int = 16) -> Router:
    torch.manual_seed(0)
    return Router(dim, config)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek-v3-debug", 6_552_576),
        # "15.7B" in the paper; TorchTitan's deepseek_v3_16b has these dimensions.
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-moe-16b", 16_375_728_128),  # "16.4B"
        ("deepseek-v3", 671_026_404_352),  # "671B", without the multi-token prediction module
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    model = models.preset(name).build("meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_every_preset_is_covered_above() -> None:
    assert list(PRESETS) == ["deepseek-v3-debug", "deepseek-v2-lite", "deepseek-moe-16b", "deepseek-v3"]


def test_documentation_has_the_parameters_of_every_preset() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name in models.names():
        count = sum(p.numel() for p in models.preset(name).build("meta").parameters())
        assert f"| `{name}` | {count:,} |" in text


@pytest.mark.parametrize(
    ("name", "active"),
    [("deepseek-v2-lite", 2.4), ("deepseek-moe-16b", 2.8), ("deepseek-v3", 37.0)],
)
def test_active_parameters_are_those_of_the_papers(name: str, active: float) -> None:
    """In billions, rounded as the papers do: DeepSeekMoE counts embedding and head, the later ones the head."""
    model = models.preset(name).build("meta")
    total = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            mixture = module.router.config
            bank = sum(p.numel() for p in module.experts.parameters())
            total -= bank * (mixture.experts - mixture.active) // mixture.experts
    if name != "deepseek-moe-16b":
        total -= model.tok_embeddings.weight.numel()
    assert total / 1e9 == pytest.approx(active, rel=0.025)


def test_first_layers_are_dense() -> None:
    for name, config in PRESETS.items():
        kinds = [type(layer.moe).__name__ for layer in config.build("meta").layers]
        dense = config.dense_layers
        assert kinds == ["NoneType"] * dense + ["MixtureOfExperts"] * (config.n_layers - dense), name


def test_a_sequence_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens but the model takes 16"):
        tiny()(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": None, "n_heads": 5}, "dim 32 must be n_heads 5"),
        ({"dense_layers": 4}, "give 0 to n_layers, 3"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "relu"}, "choose one of softmax, sigmoid"),
        ({"groups": 5}, "12 experts do not make 5 equal groups"),
        ({"groups": 12}, "equal groups of at least 2"),
        ({"active_groups": 5}, "give 1 to groups, 4"),
        ({"active": 7}, "1 to 6 experts, those of 2 of 4 groups"),
    ],
)
def test_mixtures_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SIGMOID, **changes)  # type: ignore[arg-type]


def test_odd_rotary_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="rope_dim is 3"):
        LatentConfig(q_rank=None, kv_rank=4, nope_dim=4, rope_dim=3, v_dim=4)


# --- YaRN
# -------------------------------------------------------------------------------------------------------


def test_yarn_of_deepseek_v3_keeps_fast_pairs_and_slows_the_others_forty_times() -> None:
    """Widths and bounds of arXiv:2309.00071, equation 17 ff., worked out by hand for 64 channels."""
    scaling = YarnScaling(factor=40.0)
    plain = yarn_frequencies(64, 10_000.0, None).double()
    scaled = yarn_frequencies(64, 10_000.0, scaling).double()
    # Pairs that turn 32 times and once over 4096 tokens: 10.47 and 22.51, rounded outwards.
    assert scaled[:11].tolist() == plain[:11].tolist()
    torch.testing.assert_close(scaled[23:], plain[23:] / 40.0, rtol=1e-6, atol=0)
    for pair in range(11, 23):
        slowed = (pair - 10) / 13
        assert scaled[pair].item() == pytest.approx(plain[pair].item() * (1 - slowed + slowed / 40), rel=1e-5)
    assert scaling.score_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert scaling.rotation_factor == 1.0


def test_yarn_magnitudes_differ_where_the_two_scales_do() -> None:
    scaling = YarnScaling(factor=40.0, mscale=1.0, mscale_all_dim=0.0)
    assert scaling.score_factor == 1.0
    cos, sin = yarn_table(8, 10_000.0, scaling, 4, torch.device("cpu"))
    assert (cos**2 + sin**2).sqrt().flatten().tolist() == pytest.approx([0.1 * math.log(40) + 1] * 16)


# --- routers
# ----------------------------------------------------------------------------------------------------


def reference_routes(config: MixtureConfig, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Experts of one token and their weights, one formula of the papers a line."""
    if config.score == "softmax":
        total = sum(math.exp(z) for z in logits)
        s = [math.exp(z) / total for z in logits]
    else:
        s = [1 / (1 + math.exp(-z)) for z in logits]
    choice = [a + b for a, b in zip(s, bias)]
    size = len(s) // config.groups
    best = 2 if config.score == "sigmoid" else 1
    affinity = [
        sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:best]) for g in range(config.groups)
    ]
    groups = sorted(range(config.groups), key=lambda g: -affinity[g])[: config.active_groups]
    reachable = [e for e in range(len(s)) if e // size in groups]
    chosen = sorted(reachable, key=lambda e: -choice[e])[: config.active]
    total = sum(s[e] for e in chosen) if config.normalized else 1.0
    return {e: s[e] / total * config.scale for e in chosen}


@pytest.mark.parametrize(
    "config",
    [
        SOFTMAX,
        dataclasses.replace(SOFTMAX, normalized=True),
        dataclasses.replace(SOFTMAX, groups=3, active_groups=2, scale=16.0),
        SIGMOID,
        dataclasses.replace(SIGMOID, normalized=False, groups=1, active_groups=1),
    ],
    ids=["moe-16b", "normalized", "v2", "v3", "one group"],
)
def test_router_follows_the_papers(config: MixtureConfig) -> None:
    module = router(config)
    if module.expert_bias is not None:
        module.expert_bias.copy_(0.3 * torch.randn(config.experts))
    bias = [0.0] * config.experts if module.expert_bias is None else module.expert_bias.tolist()
    x = 3.0 * torch.randn(40, 16)
    weights, indices = module(x)
    assert weights.dtype == torch.float32
    assert weights.shape == indices.shape == (40, config.active)
    logits = (x.double() @ module.gate.weight.double().T).tolist()
    seen = set()
    for token in range(40):
        found = dict(zip(indices[token].tolist(), weights[token].tolist()))
        assert found == pytest.approx(reference_routes(config, logits[token], bias), rel=1e-4)
        seen |= found.keys()
    assert len(seen) > config.active  # tokens went to different experts


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    module = router(dataclasses.replace(SIGMOID, normalized=False, scale=1.0))
    assert module.expert_bias is not None
    module.expert_bias[[0, 1, 2]] = 10.0
    x = torch.randn(5, 16)
    weights, indices = module(x)
    assert indices.sort(-1).values.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, module.gate(x).sigmoid().gather(-1, indices))


def test_gradients_of_the_weights_reach_the_gate_and_the_input_alone() -> None:
    module = router(SIGMOID)
    x = torch.randn(5, 16, requires_grad=True)
    weights, _ = module(x)
    (weights * torch.randn_like(weights)).sum().backward()
    assert module.gate.weight.grad is not None
    assert module.gate.weight.grad.abs().sum() > 0
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_router_computes_in_float32_in_a_bfloat16_model_and_under_autocast() -> None:
    module = router(SIGMOID)
    x = torch.randn(64, 16).bfloat16()
    weight = module.gate.weight.bfloat16().float()
    module.to(torch.bfloat16)
    expected = x.float() @ weight.T
    torch.testing.assert_close(module.gate(x), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module.gate(x), expected, rtol=1e-5, atol=1e-5)


# --- balance
# ----------------------------------------------------------------------------------------------------


def test_bias_moves_against_the_load_by_its_rate() -> None:
    module = router(SIGMOID)
    assert module.expert_bias is not None
    module.tokens_per_expert.copy_(torch.tensor([5, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]))  # the mean is 2
    balance(module)
    rate = SIGMOID.balance_rate
    assert module.expert_bias.tolist() == pytest.approx([-rate, rate] + [0.0] * 9 + [rate])  # type: ignore
    assert module.tokens_per_expert.tolist() == [0] * 12
    before = module.expert_bias.clone()
    balance(module)
    assert torch.equal(module.expert_bias, before)  # a step without tokens changes nothing


def test_tokens_are_counted_in_training_alone() -> None:
    module = router(SIGMOID)
    x = torch.randn(50, 16)
    module(x)
    counts = module.tokens_per_expert.clone()
    assert counts.sum() == 50 * SIGMOID.active
    assert torch.equal(counts, module(x)[1].flatten().bincount(minlength=12))
    module.tokens_per_expert.copy_(counts)
    with torch.no_grad():
        module(x)
    module.eval()
    module(x)
    assert torch.equal(module.tokens_per_expert, counts)


def test_balancing_spreads_a_load_that_stood_on_few_experts() -> None:
    config = dataclasses.replace(SIGMOID, groups=1, active_groups=1)
    module = router(config)
    x = torch.randn(200, 16) + 2.0  # a common direction makes some experts everybody's

    def load() -> float:
        counts = module(x)[1].flatten().bincount(minlength=12).float()
        return (counts.max() / counts.mean()).item()

    before = load()
    for _ in range(100):
        module.tokens_per_expert.zero_()
        module(x)
        balance(module)
    assert before > 2.5
    assert load() < 1.4


def test_a_step_of_the_model_balances_every_router() -> None:
    model = tiny()
    model(torch.randint(0, 19, (2, 16)))
    model.after_step()
    biases = [m.expert_bias for m in model.modules() if isinstance(m, Router)]
    assert len(biases) == 2
    for bias in biases:
        assert bias is not None
        assert bias.abs().max().item() == pytest.approx(0.01)


def test_bias_stays_float32_when_the_model_is_cast_and_is_no_parameter() -> None:
    model = TINY.build(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        biases = {n: b for n, b in model.state_dict().items() if n.endswith("expert_bias")}
        assert len(biases) == 2
        assert all(b.dtype == torch.float32 for b in biases.values())
    assert not any("bias" in name for name, _ in model.named_parameters())
    assert not any("tokens_per_expert" in name for name in model.state_dict())


def test_a_cast_keeps_the_value_of_the_bias() -> None:
    module = router(SIGMOID)
    assert module.expert_bias is not None
    module.expert_bias.fill_(1.001)
    assert module.to(torch.bfloat16).expert_bias.tolist() == pytest.approx([1.001] * 12)


# --- experts and the whole model
# --------------------------------------------------------------------------------


def reference_mixture(module: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token and one expert after another in float64."""
    config, bank = module.router.config, module.experts

    def silu_gated(v: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        gate = w1.double() @ v
        return w2.double() @ (gate / (1 + torch.exp(-gate)) * (w3.double() @ v))

    bias = module.router.expert_bias
    bias = [0.0] * config.experts if bias is None else bias.tolist()
    rows = []
    for token in x.double():
        routes = reference_routes(config, (module.router.gate.weight.double() @ token).tolist(), bias)
        row = sum(w * silu_gated(token, bank.w1[e], bank.w3[e], bank.w2[e]) for e, w in routes.items())
        shared = module.shared_experts
        assert isinstance(shared, FeedForward)
        # The shared experts side by side are one wider layer.
        for part in torch.arange(shared.w1.out_features).chunk(config.shared):
            row = row + silu_gated(
                token, shared.w1.weight[part], shared.w3.weight[part], shared.w2.weight[:, part]
            )
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=["moe-16b", "v3"])
def test_mixture_and_its_gradients_match_the_reference_in_float64(config: MixtureConfig) -> None:
    torch.manual_seed(0)
    module = MixtureOfExperts(16, config)
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    x = torch.randn(2, 7, 16, requires_grad=True)
    direction = torch.randn(2, 7, 16)
    out = module(x)
    (out * direction).sum().backward()
    found = {n: p.grad for n, p in module.named_parameters()} | {"x": x.grad}

    again = x.detach().clone().requires_grad_()
    expected = reference_mixture(module, again.flatten(0, 1)).view(2, 7, 16)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # The router's weights are numbers in the reference: its gradients and the part of x's through them are not.
    names = [n for n, _ in module.named_parameters() if "router" not in n]
    gradients = torch.autograd.grad(
        (expected * direction.double()).sum(), [module.get_parameter(n) for n in names]
    )
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def reference_logits(model: DeepSeek, tokens: list[int]) -> Tensor:
    """DeepSeek-MoE-16B's architecture for one sequence in float64: plain attention, loops over heads."""
    config = model.config
    w = {name: value.double() for name, value in model.state_dict().items()}
    head = config.dim // config.n_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weight

    def rotate(v: Tensor, position: int) -> Tensor:
        z = torch.view_as_complex(v.reshape(-1, 2))
        angle = position * 10_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        return torch.view_as_real(z * torch.exp(1j * angle)).flatten()

    x = w["tok_embeddings.weight"][tokens]
    for n, layer in enumerate(model.layers):
        p = f"layers.{n}."
        h = norm(x, w[p + "attention_norm.weight"])
        q, k, v = (h @ w[f"{p}attention.{m}.weight"].T for m in ("wq", "wk", "wv"))
        rows = []
        for t in range(len(tokens)):
            heads = []
            for part in torch.arange(config.dim).split(head):
                keys = torch.stack([rotate(k[s, part], s) for s in range(t + 1)])
                scores = keys @ rotate(q[t, part], t) / math.sqrt(head)
                heads.append(scores.softmax(0) @ v[: t + 1, part])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ w[p + "attention.wo.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        if n < config.dense_layers:
            gate = h @ w[p + "feed_forward.w1.weight"].T
            hidden = gate / (1 + torch.exp(-gate)) * (h @ w[p + "feed_forward.w3.weight"].T)
            x = x + hidden @ w[p + "feed_forward.w2.weight"].T
        else:
            x = x + reference_mixture(layer.moe, h)  # type: ignore[arg-type]
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


@torch.no_grad()
def test_logits_of_deepseek_moe_match_the_reference_in_float64() -> None:
    model = tiny(MOE_16B)
    for name, weight in model.named_parameters():  # attention far from uniform, norms from one
        weight.mul_(torch.rand_like(weight) + 0.5 if "norm" in name else 3.0)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = reference_logits(model, tokens)
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(model(torch.tensor([tokens]))[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_token_changes_no_earlier_logits() -> None:
    model = tiny().eval()
    tokens = torch.randint(0, 19, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 19
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-5)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


def test_initial_weights_follow_the_seed_and_the_published_deviation() -> None:
    first, again, other = tiny(seed=1).state_dict(), tiny(seed=1).state_dict(), tiny(seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])
    assert {PRESETS[n].initial_std for n in ("deepseek-v3", "deepseek-v2-lite", "deepseek-moe-16b")} == {
        0.006
    }
    model = dataclasses.replace(TINY, dim=128, initial_std=0.006).build("meta").to_empty(device="cpu")
    model.init_weights(0)
    for name, value in model.named_parameters():
        if value.dim() > 1:  # a normal cut at three deviations spreads 0.9866 times as wide
            assert value.std().item() == pytest.approx(0.9866 * 0.006, rel=0.06), name
    assert all(b.abs().sum() == 0 for b in model.buffers())


def test_linears_and_experts_convert_and_the_router_stays() -> None:
    report = octavo.convert(tiny())
    assert {"layers.1.moe.experts", "layers.2.moe.experts"} <= set(report.converted)
    left = {d.name: d.reason for d in report.decisions if d.recipe is None}
    assert set(left) == {"layers.1.moe.router.gate", "layers.2.moe.router.gate", "output"}
    assert "Gate is a subclass" in left["layers.1.moe.router.gate"]
    spans = {"layers.0.feed_forward", "layers.1.moe.shared_experts", "layers.2.moe.shared_experts"}
    assert spans <= set(report.spans)
