"""What a training job leaves behind: a table on the screen and ``report.json``."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from octavo import models
from octavo._version import __version__
from octavo.trainer import flops, operand_stats
from octavo.trainer.config import TrainConfig
from octavo.trainer.data import Corpus
from octavo.trainer.records import FINAL_STEPS, Run

SCHEMA = 2
KIND = "octavo train"
MAX_EXPONENT = math.log(sys.float_info.max)


def difference_percent(value: float | None, reference: float | None) -> float | None:
    """How much larger ``value`` is than ``reference``, in percent; None where that says nothing."""
    if value is None or reference is None:
        return None
    percent = 100.0 * (value - reference) / reference
    return percent if abs(percent) < float("inf") else None  # false for NaN too


def baseline_of(config: TrainConfig, runs: list[Run]) -> Run | None:
    """The run that others are compared with, None where there is none or it did not finish."""
    return next((run for run in runs if run.recipe == config.baseline and run.status == "finished"), None)


def perplexity(loss: float | None) -> float | None:
    """``exp`` of a loss in nats a token; None where there is none, or where it is larger than any number."""
    if loss is None or not loss < MAX_EXPONENT:  # false for NaN too
        return None
    return math.exp(loss)


def _run_as_data(config: TrainConfig, run: Run, baseline: Run | None) -> dict[str, Any]:
    compared = baseline if baseline is not run and run.status == "finished" else None
    return {
        "name": run.recipe,
        "recipe": run.recipe,
        "status": run.status,
        "failure": run.failure,
        "converted_layers": run.converted,
        "steps": len(run.steps),
        "final_loss": run.final_loss,
        "validation_loss": run.validation_loss,
        "perplexity": perplexity(run.validation_loss),
        "compared_with": compared.recipe if compared else None,
        "final_loss_difference_percent": difference_percent(
            run.final_loss, compared.final_loss if compared else None
        ),
        "validation_loss_difference_percent": difference_percent(
            run.validation_loss, compared.validation_loss if compared else None
        ),
        "tokens_per_second": run.tokens_per_second(config.tokens_per_step),
        "mfu": run.mfu,
        "peak_memory_bytes": run.peak_memory,
        "fp8_flops_share": flops.fp8_share(run.flops),
        "flops_per_step": run.flops,
        "wall_seconds": run.wall_seconds,
        "loss": run.losses,
        "grad_norm": [step.grad_norm for step in run.steps],
        "learning_rate": [step.learning_rate for step in run.steps],
        "step_seconds": [step.seconds for step in run.steps],
        "operands": operand_stats.over_steps(run.steps),
    }


def device_name(device: str) -> str:
    """The GPU's own name, or the processor's architecture and how many threads PyTorch uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def parameter_count(model: str) -> int:
    """Parameters of a preset, tied ones counted once."""
    return sum(p.numel() for p in models.preset(model).build("meta").parameters())


def as_data(config: TrainConfig, corpus: Corpus, runs: list[Run], command: str) -> dict[str, Any]:
    """Everything about the job as plain data, the content of ``report.json``; NaN and inf are None.

    Losses are in nats a token, times in seconds, shares from 0 to 1. ``final_loss`` is the mean over the last
    ``final_loss_steps`` steps; ``tokens_per_second`` and ``mfu`` are those of the median step;
    ``flops_per_step`` was counted while one step ran, without causal attention's saving;
    ``peak_memory_bytes`` is of tensors on a GPU, of the whole process on a CPU, without watched steps;
    ``operands`` is what :func:`octavo.trainer.operand_stats.over_steps` gives.
    """
    baseline = baseline_of(config, runs)
    content = {
        "report": KIND,
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "versions": {"octavo": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "device": device_name(config.device),
            "cpus": os.cpu_count(),
            "system": platform.system(),
        },
        "model": {"name": config.model, "parameters": parameter_count(config.model)},
        "data": {
            "source": corpus.source,
            "files": corpus.files,
            "sha256": corpus.sha256,
            "train_tokens": len(corpus.train),
            "validation_tokens": len(corpus.validation),
        },
        "config": config.as_data(),
        "final_loss_steps": FINAL_STEPS,
        "baseline": config.baseline,
        "runs": [_run_as_data(config, run, baseline) for run in runs],
    }
    return finite(content)


def write_json(data: dict[str, Any], path: Path) -> None:
    """Writes ``data`` to ``path`` in one move, so that nobody reads half of it. NaN and inf become null."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(finite(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def finite(value: Any) -> Any:
    """``value`` with null for each number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(data: dict[str, Any]) -> Table:
    """The job's result, a row for each recipe."""
    config, baseline = data["config"], data["baseline"]
    batch = f"{config['batch_size']} x {config['seq_len']} tokens"
    steps = f"{config['steps']} steps" if "steps" in config else "steps"
    title = f"{data['model']['name']}, {steps} of {batch}"
    title += f", compared with {baseline}" if baseline else ""
    result = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    headers = ["final\nloss", "diff.\n%", "held-out\nloss", "diff.\n%"]
    headers = headers if baseline else headers[::2]
    result.add_column("recipe", overflow="fold", vertical="bottom")
    for header in (*headers, "tokens\nper s", "FP8\nFLOPs", "wall\ntime"):
        result.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    for run in data["runs"]:
        stopped = "" if run["status"] == "finished" else f" ({run['status']} at {run['steps']})"
        cells = [_cell(run["final_loss"], ".4f")]
        cells += [_cell(run["final_loss_difference_percent"], "+.3f")] if baseline else []
        cells += [_cell(run["validation_loss"], ".4f")]
        cells += [_cell(run["validation_loss_difference_percent"], "+.3f")] if baseline else []
        cells += [_cell(run["tokens_per_second"], ",.0f"), _cell(run["fp8_flops_share"], ".1%")]
        result.add_row(Text(run["name"] + stopped), *cells, f"{run['wall_seconds']:,.0f} s")
    return result
