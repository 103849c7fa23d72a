"""What README and docs show is run; what CI runs is what the README says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_lm_mtp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page, "python"))
    if "mlx_lm.load(" in block
]


@pytest.mark.parametrize("block", EXAMPLES)
def test_python_examples_run(
    block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    mlx_lm_mtp.install()
    try:
        exec(compile(block, "example", "exec"), {"__name__": "example"})
    finally:
        mlx_lm_mtp.uninstall()
    assert "Draft: " in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def commands() -> list[str]:
    """The two commands that do all the set-up."""
    return [b.strip() for b in blocks(ROOT / "README.md", "shell") if "venv" in b]


def test_the_first_command_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last part, in this environment; the install is tested with the packaging."""
    *install, generate = commands()[0].split(" && ")
    assert install[-1].startswith("pip install ")
    _, *arguments = shlex.split(generate)
    code = "import sys; from mlx_lm_mtp.cli import generate; sys.exit(generate())"
    out = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    assert out.splitlines()[-1].startswith("Draft: mtp, k=3, ")


def test_ci_runs_the_second_command() -> None:
    *_, install, test = commands()[1].split(" && ")
    script = (ROOT / ".ci" / "run").read_text()
    assert install.removeprefix("pip install ") in script
    assert re.search(rf"^{test}\b", script, re.MULTILINE)


def test_the_documented_contract_is_the_contract() -> None:
    import inspect

    from mlx_lm_mtp import Drafter

    page = (ROOT / "docs" / "drafters.md").read_text()
    for name in ("begin", "prefill", "draft", "observe"):
        parameters = inspect.signature(getattr(Drafter, name)).parameters
        shown = ", ".join(
            p.name if p.name == "self" else f"{p.name}: {p.annotation}"
            for p in parameters.values()
        )
        assert f"def {name}({shown}) -> " in page


def test_every_option_is_in_the_readme() -> None:
    from dataclasses import fields

    from mlx_lm_mtp import DraftOptions

    for option in fields(DraftOptions):
        assert option.name in README or not option.metadata


def test_every_drafter_and_its_options_are_documented() -> None:
    from mlx_lm_mtp.plugins import drafters

    page = (ROOT / "docs" / "drafters.md").read_text()
    for name in drafters():
        assert f"`{name}`" in README
        for described in drafters()[name].described():
            assert f"`{described.partition('=')[0]}`" in page


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_changelog_knows_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"| {'.'.join(mlx_lm_mtp.__version__.split('.')[:2])} |" in changelog
