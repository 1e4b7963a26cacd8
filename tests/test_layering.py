"""Imports point one way, files stay readable, and nothing in the package prints or catches everything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 600

CORE = {"_version", "errors", "formats", "hardware", "dispatch", "library", "launch", "compile_cases"}
KERNELS = CORE | {"quantize", "matmul", "fused", "flydsl"}
LEAVES = {"bench", "cli", "testing"}
"""Imported by nobody (but ``__main__`` starts the command line, and the command line starts the bench)."""

MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "formats": set(),
    "library": set(),
    "errors": set(),
    "launch": set(),
    "compile_cases": set(),
    "dispatch": {"formats"},
    "hardware": {"_version", "formats"},
    "flydsl": CORE,
    "quantize": CORE,
    "matmul": CORE | {"quantize", "flydsl"},
    "fused": CORE | {"quantize", "matmul"},
    "training": KERNELS,
    "operators": KERNELS,
    "integrations": KERNELS | {"training", "operators", "serving"},
    "testing": set(),
    "__main__": {"cli"},
}
"""What each part may import beside itself; every other part may import all but LEAVES."""


def _part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


PARTS = {_part(path) for path in FILES}


def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, part) of every import of the package in a file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            names = [f"octavo.{alias.name}" for alias in node.names] if module == "octavo" else [module]
        else:
            continue
        parts = [name.split(".") for name in names]
        found += [(node.lineno, (p + ["octavo"])[1]) for p in parts if p[0] == "octavo"]
    return found


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    """The module a ``from`` import names, with leading dots resolved against the file's own package."""
    if not node.level:
        return node.module or ""
    package = ["octavo", *path.relative_to(SOURCE).parts[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def _allowed(part: str) -> set[str]:
    if part == "cli":
        return (PARTS | {"octavo"}) - {"testing", "cli"}
    if part == "bench":
        return (PARTS | {"octavo"}) - LEAVES
    return MAY_IMPORT.get(part, (PARTS | {"octavo"}) - LEAVES)


@pytest.mark.parametrize("part", sorted(PARTS - {"__init__"}))
def test_imports_point_one_way(part: str) -> None:
    allowed = _allowed(part) | {part}
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in FILES
        if _part(path) == part
        for line, name in _imports(path)
        if name not in allowed
    ]
    assert wrong == []


def test_the_package_itself_imports_no_leaf() -> None:
    assert not {name for _, name in _imports(SOURCE / "__init__.py")} & LEAVES


def test_kernel_languages_are_imported_in_kernel_and_launch_modules_alone() -> None:
    """Elsewhere only inside functions, so that importing the package loads neither."""
    wrong = []
    for path in FILES:
        if path.stem == "kernels" or path.stem.endswith(("_kernels", "_launch")):
            continue
        for node in _run_at_import(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [getattr(node, "module", None) or ""]
            )
            if {name.partition(".")[0] for name in names} & {"triton", "flydsl"}:
                wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert wrong == []


def _run_at_import(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _type_checking(
            node
        ):
            found += _run_at_import(node)
    return found


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@pytest.mark.parametrize("root", [SOURCE, TESTS], ids=["src", "tests"])
def test_files_stay_readable(root: Path) -> None:
    sizes = {str(p.relative_to(root)): len(p.read_text().splitlines()) for p in root.rglob("*.py")}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


def test_nothing_prints_and_nothing_catches_everything() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            prints = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            )
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            if prints or bare:
                wrong.append(
                    f"{path.relative_to(SOURCE)}:{node.lineno} {'print' if prints else 'bare except'}"
                )
    assert wrong == []


def test_the_checks_see_what_they_forbid(tmp_path: Path) -> None:
    """Guards the guards: a file that breaks the import rules is found out."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import triton\ndef f():\n    import flydsl\n    from octavo.training import recipes\nfrom octavo import cli\n"
    )
    assert sorted(name for _, name in _imports(bad)) == ["cli", "training"]
    assert [node.lineno for node in _run_at_import(ast.parse(bad.read_text()))] == [1, 5]
