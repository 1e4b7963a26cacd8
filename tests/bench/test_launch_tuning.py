"""`octavo tune --launch`: what wins, what is written, and that the overlay is read first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.bench import launch_tuning, timing
from octavo.bench.agreement import same_bits, sqnr_db
from octavo.bench.launch_tuning import Space
from octavo.matmul import candidates as product_candidates
from octavo.matmul import launch_tables as product_tables
from octavo.quantize import candidates, launch_tables

TILE = {
    "block_m": 128,
    "block_k": 64,
    "warps": 4,
    "group": 1,
    "evict": 0,
    "reverse": 1,
    "owned": 4,
    "quads": 1,
}
MINE = {"tiles": {"turned/1x128": TILE}}


def _row(candidate: Any, *ms: float, room: str = "quantize") -> dict[str, Any]:
    return {"room": room, "case": "c", "candidate": candidate, **({"ms": list(ms)} if ms else {"error": "E"})}


def test_only_what_is_clearly_faster_replaces_an_entry() -> None:
    table = _row({}, 1.0, 2.0)
    assert launch_tuning.best([table, _row(MINE, 0.99, 1.99)]) is None
    assert launch_tuning.best([table, _row(MINE, 0.9, 1.9)]) == _row(MINE, 0.9, 1.9)
    assert launch_tuning.best([table, _row(MINE)]) is None
    # Where the table's own launch fails, whatever is right wins.
    assert launch_tuning.best([_row({}), _row(MINE, 3.0)]) == _row(MINE, 3.0)


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OCTAVO_TABLES", str(tmp_path))
    for tables in (launch_tables, product_tables):
        tables.load.cache_clear()
    yield tmp_path
    for tables in (launch_tables, product_tables):
        tables.load.cache_clear()


def test_winners_are_written_merged_and_read_before_the_committed_table(overlay: Path) -> None:
    other = {"tiles": {"turned/1x32": TILE}}
    product = {"dense block": [product_tables.entry(product_candidates.DENSE["dense block"][3])]}
    launch_tuning.write_for([_row(MINE, 1.0)], overlay, "sm_90")
    rows = [_row(other, 1.0), _row(product, 1.0, room="matmul")]
    paths = launch_tuning.write_for(rows, overlay, "sm_90")
    assert [path.name for path in paths] == ["quantize-sm_90.json", "matmul-sm_90.json"]
    for bucket in ("turned/1x128", "turned/1x32"):
        assert launch_tables.lookup("sm_90", "tiles", bucket) == TILE
    assert launch_tables.lookup("sm_90", "tiles", "direct/1x128")["block_k"] == 1024
    assert product_tables.lookup("sm_90", 8192, "dense block").tile == (64, 128, 128)
    # Entries for few rows stay as they were.
    assert product_tables.lookup("sm_90", 64, "dense block").split == 4
    assert launch_tables.lookup("gfx942", "tiles", "turned").get("quads") is None


def test_the_users_folder_is_used_without_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_TABLES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert launch_tables.overlay_folder() == tmp_path / "octavo" / "tables"


def test_a_wrong_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def replay(functions: Any, sets: Any, rounds: int) -> dict[str, float]:
        timed.append(functions["it"](*sets[0]))
        return {"it": 1.0}

    monkeypatch.setattr(timing, "replay_ms", replay)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1 << 20)

    def call(x: torch.Tensor) -> torch.Tensor:
        wrong = launch_tables.lookup("sm_90", "tiles", "turned/1x128") == TILE
        return x + (1 if wrong else 0)

    def differs(inputs: Any, found: torch.Tensor) -> str | None:
        return same_bits((found,), inputs)

    space = Space("quantize", "c", lambda: [(torch.zeros(4),)], call, differs, [MINE])
    rows = launch_tuning.time_space(space)
    assert rows[0]["ms"] == [1.0]
    assert "4 of 4 differ" in rows[1]["error"]
    assert len(timed) == 1


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
def test_candidates_are_pieces_of_a_table(arch: str) -> None:
    """Each names kernels and integers as a table does, so that a winner can be written as it is."""
    table = launch_tables.load(arch)
    spaces = {**candidates.DENSE, **candidates.FUSED, **candidates.GROUPED}
    for name, pieces in spaces.items():
        assert pieces, name
        for piece in pieces:
            for kernel, buckets in piece.items():
                assert kernel in table
                assert all(isinstance(v, int) for config in buckets.values() for v in config.values())
    assert set(launch_tuning.DENSE) == set(candidates.DENSE)


def test_agreement_in_db() -> None:
    x = torch.ones(100)
    assert sqnr_db(x, x) == float("inf")
    assert sqnr_db(x * 1.1, x) == pytest.approx(20.0, abs=1e-3)
    assert sqnr_db(torch.full((100,), torch.nan), x) == float("-inf")
