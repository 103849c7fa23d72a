"""The shape of the package: one direction of imports, exports, light starts."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_lm_mtp

ROOT = Path(mlx_lm_mtp.__file__).parent

FAMILIES = ("qwen", "deepseek", "mimo", "ernie", "exaone", "nemotron")
# A module imports only from those above it. What a line has in common is a layer.
LAYERS = [
    {
        "_version",
        "errors",
        "random_state",
        "wrapping",
        "choices",
        "purity",
        "regime",
        "declared",
        "anatomy",
        "rounds",
        "gaps",
        "arguments",
        "store",
        "costs",
    },
    {
        "futile",
        "acceptance",
        "depth",
        "options",
        "stats",
        "origin",
        "drafters.matching",
        "drafters.vocabulary",
        "profile",
        "coupling",
        "history",
        "nearness",
        "trace",
    },
    {"state.kernels", "state.bits"},
    {"state.arithmetics"},
    {"state.self_check"},
    {"state.recurrence"},
    {"state.snapshot", "state.capture", "state.rowwise", "state.cuda_rows"},
    {"state.forms"},
    {
        "state.commit",
        "drafters.base",
        "heads.shards",
        "heads.family",
        "heads.quantized",
    },
    {f"heads.families.{name}" for name in FAMILIES} | {"heads.norms"},
    {"heads.families", "heads.find"},
    {"heads.head", "heads.hub", "heads.sidecar"},
    {
        "state.tree",
        "state.row_check",
        "heads.readout",
        "state.limits",
        "state.verified",
        "target",
        "accept",
        "heads",
        "hookspecs",
    },
    {"tree", "carry", "state.paths", "guides", "drafters.checked", "drafters.stepwise"},
    {
        "verify",
        "audit",
        "noise",
        "drafters.mtp",
        "drafters.ngram",
        "drafters.draft_model",
        "drafters.chain",
        "plugins",
    },
    {"propose", "certificate"},
    {"drafting", "learnt"},
    {"generate", "build"},
    {"serving.turns", "stock_cli", "stock_convert"},
    {"serving.asked"},
    {"serving.totals", "serving.answer"},
    {"serving.serving"},
    {"serving.batch"},
    {"stock_api", "stock_tools"},
    {"stock_server"},
    {"install"},
    {"extract", "replay"},
    {"testing"},
    {"testing.models", "testing.report"},
    {"testing.tokenizer", "testing.scripted", "testing.oracle"},
    {"testing.wrapped"},
    {"testing.trial"},
    {"testing.table"},
    {"testing.generations", "testing.played", "testing.offers"},
    {"testing.suite"},
    {"testing.pytest_plugin", "testing.__main__"},
    {"bench.prompts", "bench.oracle", "bench.shapes", "bench.costs"},
    {"bench.subject"},
    {"bench.drafting"},
    {"bench.measure"},
    {"bench.figures"},
    {"bench.report", "bench.plot"},
    {"bench.command"},
    {"compare.verdict", "compare.rounding"},
    {"compare.decode"},
    {"compare.report"},
    {"compare.command"},
    {"doctor.findings"},
    {"doctor.verdict", "doctor.examine"},
    {"doctor.report"},
    {"doctor.command"},
    {"cli"},
    {"__main__"},
]
# Imported while mlx_lm is being imported, before anybody has asked for drafts.
START = {
    "install",
    "stock_api",
    "stock_cli",
    "stock_convert",
    "origin",
    "errors",
    "options",
    "stats",
    "rounds",
    "gaps",
    "wrapping",
    "regime",
    "declared",
}


PACKAGES = ("state", "drafters", "bench", "compare", "doctor", "serving")


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(p for p in parts if p != "__init__")
        if name and name not in PACKAGES:
            found[name] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """Modules of the package that this one imports, at its top or inside a function."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            names = {".".join(base)} | {".".join([*base, a.name]) for a in node.names}
            found |= names & set(modules())
    return found - {name}


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_layer() -> None:
    assert set(modules()) == set().union(*LAYERS)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    upward = {i for i in imports(name, modules()[name]) if layer(i) >= layer(name)}
    # Layers of several modules may be ordered inside, but never in a circle.
    upward = {i for i in upward if layer(i) > layer(name) or name in reachable(i)}
    assert upward == set()


def reachable(name: str) -> set[str]:
    seen, todo = set(), [name]
    while todo:
        for other in imports(current := todo.pop(), modules()[current]):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def test_exports_exist_and_say_what_they_are() -> None:
    for name in mlx_lm_mtp.__all__:
        value = getattr(mlx_lm_mtp, name)
        assert name.startswith("_") or inspect.getdoc(value) or callable(value)
    assert set(mlx_lm_mtp.__all__) <= set(dir(mlx_lm_mtp))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mlx_lm_mtp.nothing  # noqa: B018


def test_install_stays_a_function_whatever_is_imported() -> None:
    code = (
        "from mlx_lm_mtp.install import patch; import mlx_lm_mtp.install, mlx_lm_mtp;"
        "assert callable(mlx_lm_mtp.install)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("when", ["before mlx_lm", "after mlx_lm"])
def test_uninstalling_undoes_copies_that_were_made_since(when: str) -> None:
    """Also of the wrappers: the package itself copies them while it is imported."""
    imports = ["import mlx_lm", "import mlx_lm_mtp; mlx_lm_mtp.install()"]
    code = "\n".join(
        [
            *(imports if when == "after mlx_lm" else imports[::-1]),
            "import mlx_lm.chat, mlx_lm.utils, sys",
            "names = ('generate', 'stream_generate', 'main', 'setup_arg_parser')",
            "module = sys.modules['mlx_lm.generate']",
            "stock = [getattr(module, n).__wrapped__ for n in names]",
            "for _ in range(2):",
            "    assert mlx_lm.stream_generate is module.stream_generate",
            "    assert mlx_lm.stream_generate is not stock[1]",
            "    assert mlx_lm.utils.load_model.__name__ == 'load_model'",
            "    mlx_lm_mtp.uninstall(); mlx_lm_mtp.uninstall()",
            "    assert [getattr(module, n) for n in names] == stock",
            "    copies = (mlx_lm, sys.modules['mlx_lm.chat'])",
            "    assert {m.stream_generate for m in copies} == {stock[1]}",
            "    mlx_lm_mtp.install()",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def functions() -> list[tuple[str, ast.FunctionDef]]:
    return [
        (f"{name}:{node.name}", node)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def test_functions_are_typed_and_fit_in_the_eye() -> None:
    lengths = []
    for name, node in functions():
        assert node.returns is not None, f"{name} has no return type"
        lengths.append((node.end_lineno or 0) - node.lineno + 1)
        limit = 60 if node.name != "draft_generate_step" else 90  # its signature
        assert lengths[-1] <= limit, f"{name} has {lengths[-1]} lines"
    assert sorted(lengths)[len(lengths) // 2] <= 12


def test_public_names_have_docstrings() -> None:
    silent = [
        name
        for name, node in functions()
        if not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and node.col_offset in (0, 4)
        and not is_inner(node, name)
    ]
    assert silent == []


def is_inner(node: ast.FunctionDef, name: str) -> bool:
    """Whether a function is defined inside another one."""
    tree = ast.parse(modules()[name.partition(":")[0]].read_text())
    return any(
        inner.lineno == node.lineno
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
    )


def test_only_what_the_start_needs_is_imported_with_mlx_lm() -> None:
    code = (
        "import mlx_lm, mlx_lm.generate, mlx_lm_mtp, sys; mlx_lm_mtp.install();"
        "print([m for m in sys.modules if m.startswith('mlx_lm_mtp.')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    loaded = set(re.findall(r"mlx_lm_mtp\.([\w.]+)", out))
    assert loaded - {"_version"} == START


def test_the_boot_module_names_the_modules_that_are_patched() -> None:
    import _mlx_lm_mtp_boot

    from mlx_lm_mtp.install import patch

    module = sys.modules[patch.__module__]
    patched = (*module._WRAPPERS, *module._SEEN_THROUGH)
    assert patched == _mlx_lm_mtp_boot.TARGETS


def test_pytest_is_imported_by_its_plugin_alone() -> None:
    importing = {
        name
        for name, path in modules().items()
        if re.search(r"^\s*(import|from) pytest\b", path.read_text(), re.MULTILINE)
    }
    assert importing == {"testing.pytest_plugin"}
