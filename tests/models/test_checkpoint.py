"""Weights from and to safetensors: the same logits as transformers, and a clear line for what is not right."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octavo
from octavo import models
from octavo.models import Llama3, Llama3Config, hf_llama, safetensors_files
from octavo.models.llama3 import RopeScaling

SMALL = Llama3Config(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_width=16, ffn_dim=40, vocab_size=37, max_seq_len=64
)
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=32)
VARIANTS = {
    "untied": SMALL,
    "tied": dataclasses.replace(SMALL, tied_embeddings=True, rope_scaling=SCALED, rope_theta=1000.0),
    "every head its own keys": dataclasses.replace(
        SMALL, dim=48, head_width=None, n_heads=6, n_kv_heads=6, norm_eps=1e-3
    ),
}


def built(config: Llama3Config = SMALL, seed: int = 0) -> Llama3:
    model = config.build()
    model.init_weights(seed)
    shake(model)
    return model


def shake(model: nn.Module) -> None:
    """Weights large enough that attention looks somewhere, and norms that differ from one and each other."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(torch.rand(weight.shape, generator=generator) + 0.5 if weight.dim() == 1 else 5.0)


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the small model, seed 0, in one file."""
    models.save_safetensors(built(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tensors(saved: Path) -> Callable[..., None]:
    """Changes what ``saved`` holds: new tensors by name, None to remove one."""

    def change(**changes: torch.Tensor | None) -> None:
        content = load_file(saved / "model.safetensors") | {
            n.replace("__", "."): t for n, t in changes.items()
        }
        save_file({n: t for n, t in content.items() if t is not None}, saved / "model.safetensors")

    return change


# --- beside transformers
# -----------------------------------------------------------------------------------------


def hf_config(config: Llama3Config) -> Any:
    from transformers import LlamaConfig

    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
    return LlamaConfig(
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied_embeddings,
        rope_parameters=rope,
    )


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    tokens = torch.randint(0, 37, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine, other = ours(tokens), theirs(tokens).logits
    assert other.std() > 0.1
    assert (mine - other).abs().max() < 1e-5 * max(1.0, other.abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_of_transformers_gives_its_logits_here(name: str, tmp_path: Path) -> None:
    LlamaForCausalLM = pytest.importorskip(
        "transformers", reason="needs the extra octavo[hf]"
    ).LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(hf_config(VARIANTS[name])).eval()
    shake(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="15KB" if name == "untied" else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (name == "untied")
    ours = models.from_pretrained(tmp_path)
    assert ours.config == dataclasses.replace(VARIANTS[name], head_width=VARIANTS[name].head_dim)
    compare(ours, theirs)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_from_here_gives_its_logits_in_transformers(name: str, tmp_path: Path) -> None:
    LlamaForCausalLM = pytest.importorskip(
        "transformers", reason="needs the extra octavo[hf]"
    ).LlamaForCausalLM

    ours = built(VARIANTS[name])
    models.save_safetensors(
        ours,
        tmp_path,
        max_shard_bytes=15_000 if name == "untied" else 10**9,
        extra_config={"eos_token_id": 3},
    )
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert theirs.dtype == torch.float32
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, 3)
    compare(ours, theirs.eval())


def test_settings_in_the_words_of_transformers_4_are_read() -> None:
    scaled = hf_llama.to_config(VARIANTS["tied"])
    assert {"rope_theta", "rope_scaling"} <= scaled.keys()
    assert hf_llama.from_config(scaled) == dataclasses.replace(VARIANTS["tied"], head_width=16)
    oldest = {k: v for k, v in scaled.items() if k not in ("rope_scaling", "head_dim", "num_key_value_heads")}
    config = hf_llama.from_config(oldest)
    assert (config.n_kv_heads, config.head_dim, config.rope_scaling, config.rope_theta) == (
        4,
        8,
        None,
        1000.0,
    )


def test_rows_are_put_in_hugging_face_order_and_back() -> None:
    rows = torch.arange(12)[:, None].expand(12, 3)  # two heads of six
    theirs = hf_llama.rows_to_hugging_face(rows, 2)
    assert theirs[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(hf_llama.rows_from_hugging_face(theirs, 2), rows)


# --- there and back
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [10**9, 15_000, 1])
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_folder_comes_back_bit_for_bit(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = built(VARIANTS[name])
    files = models.save_safetensors(model, tmp_path / "new" / "model", max_shard_bytes=max_shard_bytes)
    assert sorted(files) == sorted((tmp_path / "new" / "model").iterdir())
    sizes = [file.stat().st_size for file in files if file.suffix == ".safetensors"]
    assert len(sizes) == 1 if max_shard_bytes == 10**9 else len(sizes) > 2
    again = models.from_pretrained(tmp_path / "new" / "model")
    assert same_weights(model, again)
    assert (again.output.weight is again.tok_embeddings.weight) == (name == "tied")
    assert max_shard_bytes != 15_000 or max(sizes) < 15_000 + 1500  # and a header


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_converted_once(stored: torch.dtype, tmp_path: Path) -> None:
    model = built()
    models.save_safetensors(model, tmp_path, dtype=stored)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {stored}
    assert models.from_pretrained(tmp_path).norm.weight.dtype == stored
    for wanted in (torch.float32, torch.bfloat16):
        again = models.from_pretrained(tmp_path, dtype=wanted)
        expected = {n: w.to(stored).to(wanted) for n, w in model.state_dict().items()}
        assert all(torch.equal(w, expected[n]) for n, w in again.state_dict().items())


def test_one_file_holds_the_weights_alone(tmp_path: Path) -> None:
    model = built()
    assert models.save_safetensors(model, tmp_path / "w.safetensors") == [tmp_path / "w.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    other = built(seed=1)
    models.load_safetensors(other, tmp_path / "w.safetensors")
    assert same_weights(model, other)


def test_a_converted_and_compiled_model_is_the_same_file(tmp_path: Path) -> None:
    plain, converted = built(), built()
    octavo.convert(converted, recipe="rowwise", min_size=0)
    models.save_safetensors(plain, tmp_path / "a.safetensors")
    models.save_safetensors(torch.compile(converted), tmp_path / "b.safetensors")  # type: ignore[arg-type]
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    other = built(seed=1)
    octavo.convert(other, recipe="rowwise", min_size=0)
    models.load_safetensors(torch.compile(other), tmp_path / "a.safetensors")  # type: ignore[arg-type]
    assert same_weights(other, converted)


def test_any_module_keeps_its_own_names_and_whole_numbers(tmp_path: Path) -> None:
    def module() -> nn.Module:
        first = nn.Linear(4, 4)
        both = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 4))
        both[2].weight = first.weight  # type: ignore[union-attr]
        return both

    model, other = module(), module()
    model(torch.randn(5, 4))
    models.save_safetensors(model, tmp_path, dtype=torch.float64)
    assert not (tmp_path / "config.json").exists()
    models.load_safetensors(other, tmp_path)
    assert same_weights(model, other)
    assert other.state_dict()["1.num_batches_tracked"] == 1


def test_old_and_doubled_tensors_are_passed_over(tmp_path: Path) -> None:
    model = built(VARIANTS["tied"])
    models.save_safetensors(model, tmp_path)
    content = load_file(tmp_path / "model.safetensors")
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    save_file(content, tmp_path / "model.safetensors")
    assert same_weights(models.from_pretrained(tmp_path), model)
    content["lm_head.weight"] += 1
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.weight' with other values .* the model ties the two"):
        models.from_pretrained(tmp_path)


# --- what is refused
# ---------------------------------------------------------------------------------------------


def refused(load: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"has no tensor 'model.norm.weight', which the model needs$"),
        ({"lm_head__weight": None}, r"no tensor 'lm_head.weight'.*: its output head is not tied"),
        ({"model__bias": torch.ones(2)}, r"has tensor 'model.bias', which the model has not"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, r"has tensor 'a' and 1 more, which the model has not"),
        (
            {"model__norm__weight": torch.ones(33)},
            r"'model.norm.weight' of shape \[33\], but the model needs \[32\]",
        ),
        ({"model__norm__weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"stored as F8_E4M3, but .* BF16"),
        ({"model__norm__weight": torch.ones(32, dtype=torch.int64)}, r"stored as I64, but .* BF16"),
    ],
)
def test_tensors_of_another_model_are_refused_before_any_is_read(
    changes: dict[str, Any], message: str, saved: Path, tensors: Callable[..., None]
) -> None:
    tensors(**changes)
    model = built(seed=1)
    refused(lambda: models.load_safetensors(model, saved), message)
    assert same_weights(model, built(seed=1))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, r"is no whole safetensors file \(.*\): copy or download it again"),
        (lambda file: file.write_bytes(b"PK\x03\x04 a pickle of PyTorch"), "is no whole safetensors file"),
        (lambda file: file.write_bytes(b""), "is no whole safetensors file"),
        (lambda file: file.write_bytes(file.read_bytes()[:20]), "is no whole safetensors file"),
        (Path.unlink, "has neither model.safetensors nor model.safetensors.index.json"),
        (lambda file: shutil.rmtree(file.parent), "does not exist"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[Path], object], message: str, saved: Path) -> None:
    damage(saved / "model.safetensors")
    refused(lambda: models.load_safetensors(built(), saved), message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: _cut(folder / "model-00002-of-00003.safetensors"),
            "00002.* no whole safetensors file",
        ),
        (lambda folder: (folder / "model-00003-of-00003.safetensors").unlink(), "00003.* is missing: copy"),
        (lambda folder: (folder / safetensors_files.INDEX).write_text("{"), "index.json' is no JSON"),
        (lambda folder: (folder / safetensors_files.INDEX).write_text("[]"), "is no JSON object"),
        (lambda folder: (folder / safetensors_files.INDEX).write_text("{}"), "has no 'weight_map' of files"),
        (
            lambda folder: shutil.copy(
                folder / "model-00001-of-00003.safetensors", folder / "model-00003-of-00003.safetensors"
            ),
            "00003-of-00003.safetensors' has no tensor .* which the index promises",
        ),
    ],
)
def test_damaged_sets_of_shards_are_refused(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    models.save_safetensors(built(), tmp_path, max_shard_bytes=40_000)
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    damage(tmp_path)
    refused(lambda: models.load_safetensors(built(), tmp_path), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "is of a 'MistralForCausalLM', which is not here: give"),
        ({"architectures": None, "model_type": "qwen3"}, "is of a 'qwen3', which is not here"),
        ({"hidden_size": None}, "'hidden_size' is None in config.json: it must be a whole number"),
        ({"vocab_size": "37"}, "'vocab_size' is '37' in config.json"),
        ({"num_key_value_heads": 3}, "n_heads 4 must be a multiple of n_kv_heads 3"),
        ({"head_dim": 7}, "head_width is 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', but Llama's SwiGLU needs 'silu'"),
        ({"attention_bias": True}, "attention_bias true, but the Llama model here has no biases"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary embeddings by 'linear': only 'llama3'"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "'factor' is missing in config.json: it must be a number",
        ),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small' in config.json: it must be a number"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized: give"),
        ({"torch_dtype": "float8_e4m3fn"}, "names the dtype 'float8_e4m3fn': give one with the argument"),
    ],
)
def test_a_config_of_another_model_is_refused(changes: dict[str, Any], message: str, saved: Path) -> None:
    content = json.loads((saved / "config.json").read_text()) | changes
    (saved / "config.json").write_text(json.dumps(content))
    refused(lambda: models.from_pretrained(saved), message)


def test_a_folder_without_config_and_a_name_of_the_hub_are_refused(saved: Path) -> None:
    (saved / "config.json").unlink()
    refused(lambda: models.from_pretrained(saved), r"cannot read .*config.json' \(No such file")
    refused(lambda: models.from_pretrained("meta-llama/Llama-3.2-1B"), "is no folder: download the model")


# --- what is already saved
# ---------------------------------------------------------------------------------------


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file grows beyond 8 kB; the error is another one than that of a full disk, the way is the same."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("max_shard_bytes", [10**9, 7_000])
def test_a_disk_that_fills_up_leaves_what_was_saved(
    max_shard_bytes: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small = dataclasses.replace(SMALL, dim=4, n_layers=1, vocab_size=8)
    models.save_safetensors(built(small), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    before = content_of(tmp_path)
    with pytest.raises(OSError, match="File too large") as caught:
        models.save_safetensors(built(), tmp_path, max_shard_bytes=max_shard_bytes)
    assert str(caught.value.filename).startswith(str(tmp_path / "model"))
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("first", [10**9, 40_000, 25_000])
@pytest.mark.parametrize("second", [10**9, 40_000, 25_000])
def test_a_second_save_replaces_the_first_and_nothing_else(first: int, second: int, tmp_path: Path) -> None:
    models.save_safetensors(built(seed=0), tmp_path / "both", max_shard_bytes=first)
    (tmp_path / "both" / "tokenizer.json").write_text("{}")
    models.save_safetensors(built(seed=1), tmp_path / "both", max_shard_bytes=second)
    models.save_safetensors(built(seed=1), tmp_path / "one", max_shard_bytes=second)
    assert content_of(tmp_path / "both") == content_of(tmp_path / "one") | {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("first", [10**9, 40_000, 25_000])
def test_a_save_that_dies_at_any_rename_never_leaves_a_mixture(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each number of renames and removals: the old model, the new one, or a clear refusal."""
    models.save_safetensors(built(seed=0), tmp_path / "start", max_shard_bytes=first)
    seen = set()
    for steps in range(12):
        folder = tmp_path / str(steps)
        shutil.copytree(tmp_path / "start", folder)
        with monkeypatch.context() as patched:
            _die_after(steps, patched)
            try:
                models.save_safetensors(built(seed=1), folder, max_shard_bytes=40_000)
            except KeyboardInterrupt:
                pass
            else:
                seen.add("finished")
        if not any((folder / name).exists() for name in (safetensors_files.INDEX, safetensors_files.SINGLE)):
            refused(lambda folder=folder: models.from_pretrained(folder), "has neither")
            seen.add("refused")
        else:
            model = models.from_pretrained(folder)
            seen.add([same_weights(model, built(seed=seed)) for seed in (0, 1)].index(True))
    assert seen == {0, 1, "finished"} | ({"refused"} if first == 40_000 else set())


def _die_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(range(steps))
    commit = safetensors_files.Writer.commit

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    def counting(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(Path, "replace", counted(Path.replace))
        monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
        try:
            return commit(*arguments, **options)
        finally:
            monkeypatch.undo()

    monkeypatch.setattr(safetensors_files.Writer, "commit", counting)


def test_files_have_the_permissions_of_other_files(saved: Path) -> None:
    (saved / "other").touch()
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1


def test_a_shard_needs_room(tmp_path: Path) -> None:
    refused(lambda: models.save_safetensors(built(), tmp_path, max_shard_bytes=0), "at least 1")
