"""A run that was interrupted goes on as if it had not been: losses, weights, moments and random numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_support import COMMAND, Job, run, same, state, stop_after

from octavo import models
from octavo.models import DeepSeekConfig
from octavo.trainer import checkpoint, data, loop
from octavo.trainer.config import UserError

HISTORY = ("loss", "grad_norm", "learning_rate")


@pytest.mark.case("B34")
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("bf16", {}),
        ("rowwise", {"dtype": "bfloat16"}),
        ("blockwise", {"grad_accum": 2, "activation_checkpoint": True}),
        ("mxfp8", {"dtype": "bfloat16", "grad_accum": 4, "eval_every": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, changes: dict[str, Any]
) -> None:
    plain = job(recipes=(recipe,), steps=7, checkpoint_dir=tmp_path / "plain", checkpoint_every=3, **changes)
    expected = run(plain)
    assert expected.status == 0

    config = replace(plain, checkpoint_dir=tmp_path / "cut", out=tmp_path / "out-cut")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(5))
        cut = run(config)
    assert cut.status == 130
    assert cut.line("was interrupted") == (
        f"{recipe} was interrupted after step 5; the last good checkpoint is "
        f"{str(tmp_path / 'cut' / recipe / 'step-00000003')!r}; go on with: {COMMAND} --resume"
    )
    torch.manual_seed(99)  # another process has other random numbers
    resumed = run(replace(config, resume=True))
    assert resumed.status == 0
    assert "going on after step 3" in resumed.shown
    for name in (*HISTORY, "validation_loss"):
        assert resumed.runs[recipe][name] == expected.runs[recipe][name], name
    assert same(state(tmp_path / "plain", plain, recipe), state(tmp_path / "cut", config, recipe))


def test_random_numbers_go_on_too(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss that draws from the global generator, as dropout does."""
    original = loop.next_token_loss

    def noisy(*args: Any) -> torch.Tensor:
        return original(*args) * (1 + 0.1 * torch.rand(()))

    monkeypatch.setattr(loop, "next_token_loss", noisy)
    plain = job(steps=6, checkpoint_dir=tmp_path / "plain", checkpoint_every=2)
    expected = run(plain)
    config = replace(plain, checkpoint_dir=tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(5))
        run(config)
    torch.manual_seed(7)
    assert run(replace(config, resume=True)).losses == expected.losses


def test_a_router_that_balances_itself_goes_on_bit_for_bit(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = models.PRESETS["deepseek-v3-debug"]
    assert isinstance(preset, DeepSeekConfig)
    preset = replace(preset, n_layers=2, dim=64, ffn_dim=128)
    monkeypatch.setitem(models.PRESETS, "tiny", preset)
    plain = job(steps=4, batch_size=2, seq_len=16, checkpoint_dir=tmp_path / "plain", checkpoint_every=2)
    expected = run(plain)
    config = replace(plain, checkpoint_dir=tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(3))
        run(config)
    assert run(replace(config, resume=True)).losses == expected.losses
    states = [state(config.checkpoint_dir or tmp_path, config, "bf16") for config in (plain, config)]
    assert same(*states)
    assert any("expert_bias" in name and t.abs().sum() > 0 for name, t in states[0].items())


def test_recipes_that_are_finished_are_not_trained_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = ("bf16", "rowwise", "tensorwise")
    plain = job(recipes=recipes, baseline="bf16", checkpoint_dir=tmp_path / "plain", checkpoint_every=2)
    expected = run(plain)
    config = replace(plain, checkpoint_dir=tmp_path / "cut")
    begun: list[str] = []
    build = loop.build_model

    def remember(config: Any, recipe: str) -> Any:
        begun.append(recipe)
        return build(config, recipe)

    monkeypatch.setattr(loop, "build_model", remember)
    plain_step, stopping_step = loop.Trainer.step, stop_after(3)

    def step(self: Any, number: int) -> Any:
        return (stopping_step if begun[-1] == "rowwise" else plain_step)(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", step)
        assert run(config).status == 130
    assert begun == ["bf16", "rowwise"]
    resumed = run(replace(config, resume=True))
    assert begun == ["bf16", "rowwise", "rowwise", "tensorwise"]
    assert resumed.status == 0
    assert resumed.losses == expected.losses
    for recipe in recipes:
        for name in (
            "validation_loss",
            "converted_layers",
            "fp8_flops_share",
            "final_loss_difference_percent",
        ):
            assert resumed.runs[recipe][name] == expected.runs[recipe][name], (recipe, name)

    again = run(replace(config, resume=True))  # all is finished: the report, and no training
    assert begun[4:] == []
    assert (again.status, again.losses) == (0, expected.losses)


def test_options_that_change_no_bit_may_change(job: Job, tmp_path: Path) -> None:
    expected = run(job(steps=6))
    config = job(steps=6, checkpoint_dir=tmp_path / "saved", checkpoint_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(3))
        run(config)
    other = replace(config, resume=True, activation_checkpoint=True, checkpoint_every=5, eval_every=4, keep=1)
    resumed = run(other)
    assert resumed.losses == expected.losses
    assert sorted(p.name for p in (tmp_path / "saved/bf16").glob("step-*")) == ["step-00000006"]


@pytest.mark.case("B34")
def test_a_recipe_starts_from_anothers_weights_without_a_jump(job: Job, tmp_path: Path) -> None:
    first = job(steps=30, lr=4e-3, save_final=tmp_path / "final")
    before = run(first).runs["bf16"]
    starts = {
        recipe: run(job(recipes=(recipe,), steps=2, lr=1e-5, init_from=tmp_path / "final")).runs[recipe]["loss"][0]
        for recipe in ("bf16", "rowwise", "mxfp8")
    }  # fmt: skip
    assert starts["bf16"] < before["loss"][0] - 1
    assert starts["rowwise"] == pytest.approx(starts["bf16"], rel=0.005)
    assert starts["mxfp8"] == pytest.approx(starts["bf16"], rel=0.005)


@pytest.mark.case("B35")
def test_a_checkpoint_does_not_grow_with_the_steps(job: Job, tmp_path: Path) -> None:
    config = job(recipes=("rowwise",), steps=9, checkpoint_dir=tmp_path, checkpoint_every=1, keep=9)
    run(config)
    sizes = [
        sum(file.stat().st_size for file in path.iterdir() if file.name != checkpoint.MANIFEST)
        for path in sorted((tmp_path / "rowwise").glob("step-*"))
    ]
    assert len(sizes) == 9
    assert len(set(sizes)) == 1


def test_the_newest_ones_stay(job: Job, tmp_path: Path) -> None:
    run(job(steps=7, checkpoint_dir=tmp_path / "saved", checkpoint_every=2, keep=3))
    left = sorted(path.name for path in (tmp_path / "saved/bf16").iterdir())
    assert left == ["result.json", "step-00000004", "step-00000006", "step-00000007", "steps.jsonl"]


def test_a_folder_in_use_is_not_trained_over(job: Job, tmp_path: Path) -> None:
    config = job(checkpoint_dir=tmp_path / "saved")
    run(config)
    with pytest.raises(
        UserError, match=r"holds the checkpoints of an earlier run: go on with it by --resume"
    ):
        run(config)


def test_resuming_before_there_is_anything_starts_anew(job: Job, tmp_path: Path) -> None:
    done = run(job(checkpoint_dir=tmp_path / "saved", resume=True))
    assert done.status == 0
    assert done.line("no checkpoint yet").startswith("bf16: no checkpoint yet in ")


def test_the_history_is_whole_after_a_step_was_lost_from_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was cut short or scribbled on costs steps of the report, not the run."""
    config = job(steps=6, checkpoint_dir=tmp_path, checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(5))
        cut = run(config)
    file = tmp_path / "bf16" / checkpoint.HISTORY
    lines = file.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 2, 3, 4, 5]
    file.write_text("\n".join([lines[0], "{", '{"number": 2}', lines[2], lines[3][:20]]) + "\n")
    resumed = run(replace(config, resume=True))
    assert resumed.status == 0
    assert resumed.losses["bf16"][:2] == [cut.losses["bf16"][0], cut.losses["bf16"][2]]
    assert len(resumed.losses["bf16"]) == 4


def test_a_finished_run_writes_its_weights_later(job: Job, tmp_path: Path) -> None:
    from octavo.models.safetensors_files import opened

    config = job(steps=3, checkpoint_dir=tmp_path / "saved")
    expected = run(config)
    final = tmp_path / "final"
    resumed = run(replace(config, resume=True, save_final=final))
    assert (resumed.status, resumed.losses) == (0, expected.losses)
    with opened(final) as files:
        embedding = files.read("model.embed_tokens.weight")
    saved = state(tmp_path / "saved", config, "bf16")
    assert torch.equal(embedding, saved["model.tok_embeddings.weight"])

    for path in (tmp_path / "saved/bf16").glob("step-*"):
        shutil.rmtree(path)
    assert run(replace(config, resume=True)).losses == expected.losses
    with pytest.raises(UserError, match=r"is finished but has no checkpoint any more"):
        run(replace(config, resume=True, save_final=final))


def test_the_same_steps_see_the_same_text_after_resuming(job: Job) -> None:
    config = job()
    batches = [
        data.Batches(data.load(config.data, config.seq_len).train, config.seq_len, 4, config.seed)(9)
        for _ in range(2)
    ]
    assert torch.equal(batches[0][0], batches[1][0])
