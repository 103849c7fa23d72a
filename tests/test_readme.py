"""What README and docs show is run; what CI runs is what the README says."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import mlx_lm_mtp
from mlx_lm_mtp import DraftOptions, hookspecs
from mlx_lm_mtp.drafters import base

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


DRAFTERS = (ROOT / "docs" / "drafters.md").read_text()


def shown(method: Any) -> str:
    """A signature as the page has it."""
    return ", ".join(
        p.name
        if p.name == "self"
        else f"{p.name}: {p.annotation}"
        + ("" if p.default is p.empty else f" = {p.default}")
        for p in inspect.signature(method).parameters.values()
    )


@pytest.mark.parametrize("name", ["begin", "prefill", "draft", "observe"])
def test_the_documented_contract_is_the_contract(name: str) -> None:
    method = getattr(base.Drafter, name)
    returned = inspect.signature(method).return_annotation
    assert f"def {name}({shown(method)}) -> {returned}: ..." in DRAFTERS


@pytest.mark.parametrize(
    "method",
    [
        base.Carrying.suspend,
        base.Carrying.resume,
        base.Rewinding.rewind,
        base.Continuing.draft_behind,
    ],
    ids=lambda method: method.__name__,
)
def test_what_more_a_drafter_can_do_is_documented(method: Any) -> None:
    returned = inspect.signature(method).return_annotation
    assert f"`{method.__name__}({shown(method)}) -> {returned}`" in DRAFTERS


def test_what_a_drafter_can_give_is_documented() -> None:
    assert all(f"`{offer}`" in DRAFTERS for offer in base.OFFERS)


def test_the_hook_is_documented() -> None:
    parameters = inspect.signature(hookspecs.Register.__call__).parameters.values()
    for p in list(parameters)[1:]:
        default = "" if p.default is p.empty else f" = {p.default}"
        assert (
            f"| `{p.name}: {p.annotation}{default}` |".replace(
                "type | None", "type \\| None"
            )
            in DRAFTERS
        )
    assert f"number **{base.CONTRACT}**" in DRAFTERS


def test_the_context_is_documented() -> None:
    for field in fields(base.DraftContext):
        assert f"`{field.name}`" in DRAFTERS or field.name == "others"


def test_the_plugin_in_the_page_is_the_example() -> None:
    folder = ROOT / "examples" / "drafter_plugin"
    code = (folder / "followers.py").read_text()
    assert f"```python\n{code}```" in DRAFTERS
    assert len([line for line in code.splitlines() if line]) <= 40
    kit = (folder / "test_followers.py").read_text()
    for block in re.findall(r"```python\n(def test_.*?)```", DRAFTERS, re.DOTALL):
        assert block in kit
    for block in blocks(ROOT / "docs" / "drafters.md", "toml"):
        assert block in (folder / "pyproject.toml").read_text()


def test_every_option_is_in_the_readme() -> None:
    for option in fields(DraftOptions):
        assert option.name in README or not option.metadata


def test_every_drafter_and_its_options_are_documented() -> None:
    from mlx_lm_mtp.plugins import drafters

    for name in drafters():
        assert f"`{name}`" in README
        for described in drafters()[name].described():
            assert f"`{described.partition('=')[0]}`" in DRAFTERS


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_changelog_knows_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"| {'.'.join(mlx_lm_mtp.__version__.split('.')[:2])} |" in changelog
