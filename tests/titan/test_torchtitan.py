"""TorchTitan trains its debug models in 8 bits with nothing but overrides added to its command line.

These tests need TorchTitan 0.3 and PyTorch 2.14: ``make test-torchtitan`` makes their environment. The stock
entry point runs through ``launch.py``, which makes a CPU the device that TorchTitan looks for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="TorchTitan is not installed: make test-torchtitan")

pytestmark = pytest.mark.timeout(1800)
HERE = Path(__file__).parent
OURS = "octavo.integrations.torchtitan"
STEPS = 3
LIMIT = 600
"""Seconds that one run may take; it takes about fifteen, two minutes with torch.compile."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with TorchTitan's test data."""
    path = tmp_path_factory.mktemp("titan")
    run = [sys.executable, str(HERE / "launch.py"), "--write-assets"]
    subprocess.run(run, cwd=path, check=True, timeout=LIMIT)
    return path


def train(
    folder: Path,
    model: str,
    *arguments: str,
    recipe: str | None = "rowwise",
    gather: bool = False,
    steps: int = STEPS,
) -> list[float]:
    """Losses of a run of TorchTitan's debug configuration of ``model`` in two processes; None is its own BF16."""
    overrides = ["cpu_overrides.sdpa"]
    if recipe is not None:
        options = json.dumps({"recipe": recipe, "gather_8_bits": gather})
        kinds = ("linear", "experts") if model == "deepseek_v3" else ("linear",)
        overrides += [f"{OURS}.{kind}={options}" for kind in kinds]
        overrides += [f"{OURS}.metrics", f"{OURS}.selective_ac"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(HERE / "launch.py"),
        "--module", model, "--config", f"{model}_debugmodel", "--training.steps", str(steps),
        "--training.seq_len", "64", "--training.local_batch_size", "2", "--training.disable_cuda_graphs",
        "--debug.seed", "0", *arguments, "--override.imports", *overrides,
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0, said[-6000:]
    if recipe is not None:
        assert f"[Override] {OURS}.linear: model_spec.model.layers.0." in said
        assert f"{OURS}.linear: model_spec.model.lm_head Linear.Config -> Linear.Config" in said
        assert re.search(rf"{OURS}.experts.*-> OctavoGroupedExperts", said) or model == "llama3"
    return [float(loss) for loss in re.findall(r"step:\s+\d+\s+loss:\s+([\d.]+)", said)]


def assert_trained(losses: list[float], stock: list[float]) -> None:
    """Losses fall, and are TorchTitan's own to a percent but not the same: the products did run in 8 bits."""
    assert len(losses) == len(stock) == STEPS
    assert losses[-1] < losses[0] - 0.3
    assert losses != stock
    assert max(abs(a / b - 1) for a, b in zip(losses, stock, strict=True)) < 1e-2
    assert abs(losses[0] / stock[0] - 1) < 1e-3


@pytest.fixture(scope="module")
def stock_llama(folder: Path) -> list[float]:
    return train(folder, "llama3", recipe=None)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_llama_under_fsdp(folder: Path, stock_llama: list[float], recipe: str) -> None:
    assert_trained(train(folder, "llama3", recipe=recipe), stock_llama)


def test_gathering_in_8_bits_changes_no_loss(folder: Path) -> None:
    runs = [train(folder, "llama3", recipe="tensorwise", gather=gather) for gather in (False, True)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("backend", ["spmd_types", "full_dtensor"])
def test_llama_under_tensor_parallelism(folder: Path, backend: str) -> None:
    parallel = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.spmd_backend", backend]
    stock = train(folder, "llama3", *parallel, recipe=None)
    assert_trained(train(folder, "llama3", *parallel), stock)


def test_llama_under_hybrid_sharding(folder: Path) -> None:
    parallel = ["--parallelism.data_parallel_replicate_degree", "2"]
    assert_trained(train(folder, "llama3", *parallel), train(folder, "llama3", *parallel, recipe=None))


def test_llama_compiled(folder: Path, stock_llama: list[float]) -> None:
    losses = train(folder, "llama3", "--compile.enable", recipe="tensorwise", gather=True)
    assert_trained(losses, stock_llama)


def test_llama_resumes_from_its_checkpoint(folder: Path) -> None:
    whole = train(folder, "llama3", steps=4)
    saved = ["--checkpoint.enable", "--checkpoint.interval", "2", "--dump_folder", str(folder / "saved")]
    first = train(folder, "llama3", *saved, steps=2)
    second = train(folder, "llama3", *saved, steps=4)
    # TorchTitan's decay of the learning rate depends on the number of steps, so losses after it are close.
    assert first == whole[:2]
    assert len(second) == 2
    assert max(abs(a / b - 1) for a, b in zip(second, whole[2:], strict=True)) < 1e-2
    shutil.rmtree(folder / "saved")


@pytest.mark.parametrize("gather", [False, True])
def test_deepseek_under_expert_parallelism(folder: Path, gather: bool) -> None:
    parallel = ["--parallelism.expert_parallel_degree", "2"]
    stock = train(folder, "deepseek_v3", *parallel, recipe=None)
    assert_trained(train(folder, "deepseek_v3", *parallel, recipe="blockwise", gather=gather), stock)


def test_deepseek_under_fsdp_and_tensor_parallelism(folder: Path) -> None:
    for parallel in ([], ["--parallelism.tensor_parallel_degree", "2"]):
        stock = train(folder, "deepseek_v3", *parallel, recipe=None)
        assert_trained(train(folder, "deepseek_v3", *parallel), stock)
