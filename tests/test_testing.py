"""The kit for drafter authors: good drafters pass, and every check finds something."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bigram
import checks
import mlx.core as mx
import mutants
import oracle
import pytest
from bigram import Bigram
from scripted import Scripted

from mlx_lm_mtp import Proposal, propose
from mlx_lm_mtp.drafters import checked as checking
from mlx_lm_mtp.drafters.base import DraftContext, Drafter
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.drafting import Drafting
from mlx_lm_mtp.errors import DrafterError, InvalidOption, UnknownDrafter
from mlx_lm_mtp.heads.readout import CheapReadout
from mlx_lm_mtp.testing import (
    CHECKS,
    DrafterFault,
    Report,
    TinyModel,
    check_drafter,
    tiny_models,
)
from mlx_lm_mtp.testing.models import Spec

ROOT = Path(__file__).parents[1]
BY_NAME = {tiny.name: tiny for tiny in tiny_models()}
USUAL = ("gated-delta", "kv")


def kinds(*names: str) -> list[TinyModel]:
    return [BY_NAME[name] for name in names]


def faults(factory: Any, check: str, *models: str, **how: Any) -> str:
    """What one check finds, as the message of the error."""
    with pytest.raises(DrafterFault) as error:
        check_drafter(factory, only=[check], models=kinds(*models or USUAL), **how)
    assert {finding.check for finding in error.value.report.findings} == {check}
    return str(error.value)


# --- good drafters ------------------------------------------------------------------


class Silent:
    """A drafter that never proposes anything."""

    name = "silent"
    needs_hidden = False

    def begin(self) -> None: ...
    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None: ...
    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None: ...
    def draft(self, token: mx.array, k: int) -> Proposal:
        return Proposal.of([])


def with_a_head(context: DraftContext) -> Drafter:
    """The MTP drafter with a random head."""
    head, options = checks.head_for(context.model), context.options
    if not (options.draft_head_bits or options.shortlist):
        return MTPDrafter(head)
    cheap = (options.draft_head_bits, options.shortlist, context.tokenizer)
    return MTPDrafter(head, CheapReadout(head, *cheap))


def test_a_drafter_that_gives_everything_passes() -> None:
    report = check_drafter(Bigram)
    assert set(report.checks) == set(CHECKS)
    assert report.skipped == () and report.findings == () and report.notes == ()
    assert report.models == tuple(BY_NAME)
    assert 0 < report.accepted < report.drafted
    assert report.acceptance_rate == report.accepted / report.drafted
    assert "0 findings" in report.summary()


def test_a_drafter_with_hidden_states_passes_on_models_of_its_own() -> None:
    bf16 = Spec("qwen3_next", weights="bf16")
    report = check_drafter(with_a_head, models=[TinyModel("bf16", bf16.build)])
    assert set(report.checks) == set(CHECKS) - {"continues"}
    assert dict(report.skipped) == {
        "continues": "the drafter gives no continues",
        "head": "the drafter gives it, and the kit has no check of it",
    }


def test_a_drafter_that_proposes_nothing_passes_and_that_is_said() -> None:
    report = check_drafter(Silent, only=["greedy"], models=kinds(*USUAL))
    assert report.drafted == 0
    assert "proposed nothing of its own" in report.summary()


def test_one_that_is_never_right_passes_and_that_is_said() -> None:
    def factory() -> Drafter:
        return Scripted([])

    report = check_drafter(factory, only=["extremes"], models=kinds("kv"))
    assert report.acceptance_rate == 0
    report = check_drafter(factory, only=["greedy"], models=kinds("kv"))
    assert "none of its own drafts was accepted" in report.summary()


def test_what_was_left_out_is_said_with_its_reason() -> None:
    report = check_drafter(
        Silent, only=["greedy", "rewinds", "closed"], without=["closed"],
        models=kinds("kv"),
    )  # fmt: skip
    assert report.checks == ("greedy",)
    skipped = dict(report.skipped)
    assert skipped["closed"] == skipped["drift"] == "the caller leaves it out"
    assert skipped["rewinds"] == "the drafter gives no rewind"


# --- what makes a drafter -----------------------------------------------------------


def with_a_default(context: Any = None) -> Drafter:
    assert context is None
    return Silent()


@pytest.mark.parametrize(
    "factory",
    [
        Silent,
        Bigram,
        lambda: Silent(),
        lambda context: Silent(),
        lambda *args: Bigram(*args),
        with_a_default,
    ],
    ids=["class", "class of a context", "function", "factory", "any", "default"],
)
def test_factories(factory: Any) -> None:
    assert check_drafter(factory, only=["taken_back"], models=kinds("kv")).checks


def test_a_factory_gets_what_the_loop_gives_it() -> None:
    seen: list[DraftContext] = []

    def factory(context: DraftContext) -> Drafter:
        seen.append(context)
        mx.random.uniform()  # as building a module does
        return Silent()

    options = {"shortlist": 5, "depth": "confidence", "num_draft_tokens": 9}
    given = check_drafter(
        Bigram, only=["taken_back"], options=options, models=kinds("kv")
    )
    assert given.checks == ("taken_back",)
    check_drafter(factory, only=["taken_back"], models=kinds("kv"))
    assert all(context.model.layers for context in seen)
    assert {context.options.num_draft_tokens for context in seen} == {3}
    tokenizer = seen[0].tokenizer
    assert tokenizer.decode(tokenizer.encode("def main():")) == "def main():"
    assert tokenizer.eos_token_ids == {95}


def test_a_name() -> None:
    with pytest.raises(UnknownDrafter):
        check_drafter("no-such-drafter")


@pytest.mark.parametrize("factory", [Silent(), 7], ids=["object", "number"])
def test_what_makes_no_drafter_is_refused(factory: Any) -> None:
    with pytest.raises(TypeError, match="give what makes it"):
        check_drafter(factory)


def test_what_is_made_must_be_a_drafter() -> None:
    with pytest.raises(InvalidOption, match="lacks begin"):
        check_drafter(lambda context: 7)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(ValueError, match="no check 'gready'; the checks are: greedy, "):
        check_drafter(Silent, only=["gready"])


def test_no_models_are_refused() -> None:
    with pytest.raises(ValueError, match="models is empty"):
        check_drafter(Silent, models=[])


def test_the_random_state_and_the_device_stay_as_they_are() -> None:
    mx.random.seed(99)
    before, device = oracle.random_state(), mx.default_device()
    check_drafter(Bigram, only=["sampled"], models=kinds("kv"))
    assert (oracle.random_state(), mx.default_device()) == (before, device)


# --- negative controls: broken drafters ---------------------------------------------

# Check, broken drafter, and what the message says of it.
BROKEN = (
    ("greedy", bigram.Meddling, r"log-probabilities|tokens: from position \d+ on"),
    ("greedy", bigram.Drawing, r"draft\(\) changed the state of mx.random"),
    ("greedy", bigram.Floating, "DrafterError was raised in .*float32 tokens"),
    ("extremes", bigram.Narrow, "IndexError was raised in draft.*out of room"),
    ("extremes", bigram.NeverAlone, "AssertionError.*without draft"),
    ("sampled", bigram.Seeding, r"observe\(\) changed the state of mx.random"),
    ("processed", bigram.Seeding, r"observe\(\) changed the state of mx.random"),
    ("rounds", bigram.AllOrNothing, "ValueError was raised in observe.*2 tokens"),
    ("budgets", bigram.Impatient, "ValueError was raised in draft.*not worth it"),
    ("ends", bigram.AllOrNothing, r"ValueError was raised in observe"),
    ("closed", bigram.AllOrNothing, r"ValueError was raised in observe"),
    ("taken_back", bigram.AllOrNothing, r"ValueError was raised in observe"),
    ("faulty_callables", bigram.Unfinished, "the last generation has not ended"),
    ("faulty_drafter", bigram.Unfinished, "the last generation has not ended"),
    ("malformed", bigram.Drawing, "random state: .* was expected"),
    ("any_length", bigram.AllOrNothing, "ValueError was raised in observe"),
    ("changing_depth", bigram.NeverAlone, "AssertionError.*without draft"),
    ("beyond_the_vocabulary", bigram.Drawing, r"draft\(\) changed the state"),
    ("lazy_and_evaluated", bigram.OnlyInt32, "AssertionError.*uint32"),
    ("hidden_states", bigram.AllOrNothing, "ValueError was raised in observe"),
    ("drift", bigram.Reminiscent, r"in a second generation, round \d+ proposes"),
    ("rounds_leave_no_trace", bigram.Vain, r"one that was shown the same tokens"),
    ("rewinds", bigram.Headlong, r"rewound by 1 of 2 tokens, behind \d+ it proposes"),
    ("rewinds", bigram.OneShort, r"rewound by \d of \d tokens, behind \d+"),
    ("continues", bigram.Shortsighted, r"behind the path \[\d+, \d+, \d+\] it"),
    ("continues", bigram.Imaginative, r"after a path of 3, of which one token was"),
    ("carried", bigram.Amnesiac, "resumed, it proposes"),
    ("carried", bigram.Boastful, r"resume\(\) says that 13 tokens were seen, of 12"),
    ("foreign_entries", bigram.Trusting, r"resume\(\) says 1, not 0"),
    (
        "suspended_after_rewinding",
        bigram.Headlong,
        r"rewound by [123] of \d tokens: \d+ tokens are resumed",
    ),
    ("confidence", bigram.Sure, "confidence: probabilities were expected"),
    ("candidates", bigram.WorstFirst, "candidates: the best are"),
    ("branches", bigram.Repeating, "another choice was expected"),
    ("logprobs", bigram.Headstrong, "without asking Wanted.choose"),
    ("readout", bigram.Longlist, "shortlist: 14 tokens at most"),
)


@pytest.mark.parametrize(
    ("check", "broken", "says"), BROKEN, ids=[f"{c}-{b.__name__}" for c, b, _ in BROKEN]
)
def test_a_broken_drafter_is_found(check: str, broken: type, says: str) -> None:
    message = faults(broken, check, "gated-delta", "cycle")
    assert re.search(says, message), message
    assert f"  {check} on " in message


def test_every_check_finds_a_broken_drafter() -> None:
    assert {check for check, _, _ in BROKEN} == set(CHECKS)


def test_all_failing_checks_are_listed_and_where() -> None:
    some = ["closed", "greedy", "taken_back", "rounds"]
    with pytest.raises(DrafterFault) as error:
        check_drafter(bigram.AllOrNothing, only=some, models=kinds(*USUAL))
    assert isinstance(error.value, AssertionError)
    found = {(f.check, f.model) for f in error.value.report.findings}
    assert {(check, model) for check in some[2:] for model in USUAL} <= found
    assert "breaks its contract in 4 of 4 checks" in str(error.value)


def test_the_first_token_that_differs_is_named() -> None:
    from mlx_lm_mtp.testing.oracle import sequence_difference

    assert sequence_difference([1, 2, 3], [1, 5, 3]).startswith(
        "from position 1 on, 5 was expected, and 2 seen"
    )
    assert "position 2 on, 3 was expected, and no more seen" in sequence_difference(
        [1, 2], [1, 2, 3]
    )


# --- negative controls: broken loops ------------------------------------------------


def _as_it_comes(stock: Any) -> Any:
    return lambda self, proposal, wanted: proposal


def _uncut(stock: Any) -> Any:
    return lambda proposal, n: proposal


def _refused(stock: Any) -> Any:
    def check(self: Any, tokens: mx.array, *more: Any) -> mx.array:
        if mx.any(tokens.astype(mx.int64) > self._last).item():
            raise DrafterError("no such token")
        return stock(self, tokens, *more)

    return check


PROPOSALS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "malformed": (checking._Check, "proposal", _as_it_comes),
    "any_length": (checking, "cut", _uncut),
    "beyond_the_vocabulary": (checking._Check, "_tokens", _refused),
}


@pytest.mark.parametrize("check", PROPOSALS)
def test_proposals_that_are_not_looked_at_are_found(check: str) -> None:
    owner, name, broken = PROPOSALS[check]
    with patch.object(owner, name, broken(getattr(owner, name))):
        faults(Bigram, check)


# Planted bug, check, and the aspect that the message names.
LOOPS = (
    ("recurrent_state_not_rolled_back", "greedy", "caches"),
    ("recurrent_state_one_token_short", "greedy", "caches"),
    ("recurrent_state_rounded_to_bf16", "greedy", "caches"),
    ("conv_window_not_rolled_back", "greedy", "caches"),
    ("conv_window_one_token_short", "greedy", "caches"),
    ("kv_not_trimmed", "greedy", "caches"),
    ("one_input_too_many_kept", "greedy", "caches"),
    ("one_input_too_many_kept", "taken_back", "caches"),
    ("one_input_too_few_kept", "extremes", "caches"),
    ("wrong_drafts_accepted", "greedy", "tokens"),
    ("wrong_drafts_accepted", "any_length", "tokens"),
    ("wrong_drafts_accepted_one_by_one", "processed", "tokens"),
    ("last_draft_never_accepted", "rounds", "rounds"),
    ("bonus_token_dropped", "extremes", "tokens"),
    ("stop_keeps_all_that_was_accepted", "closed", "caches"),
    ("stop_keeps_all_that_was_accepted", "ends", "caches"),
    ("log_probabilities_of_the_round_start", "greedy", "log-probabilities"),
    ("random_state_not_put_back", "sampled", "random state"),
    ("all_positions_sampled_in_one_draw", "sampled", "tokens"),
    ("rejected_positions_drawn_anew", "sampled", "tokens"),
    ("same_noise_at_every_position", "sampled", "tokens"),
    ("rejected_positions_judged_too", "processed", "tokens"),
    ("accepted_drafts_not_in_the_history", "processed", "tokens"),
    ("history_of_pending_at_once", "processed", "tokens"),
    ("history_not_grown_at_once", "processed", "tokens"),
    ("appended_from_the_first_path", "branches", "caches"),
    ("recurrent_state_of_the_first_path", "branches", "caches"),
    ("recurrent_state_of_the_whole_path", "branches", "caches"),
    ("chosen_from_the_first_path", "branches", "tokens"),
    ("rescued_by_any_branch", "branches", "rescues"),
    ("drafter_sees_the_rescue_alone", "branches", "shown"),
)


@pytest.mark.parametrize(("bug", "check", "aspect"), LOOPS)
def test_a_broken_loop_is_found(bug: str, check: str, aspect: str) -> None:
    with getattr(mutants, bug)():
        assert f"{aspect}: " in faults(Bigram, check)


def test_a_broken_replay_is_found() -> None:
    with mutants.replayed_one_input_short():
        assert "caches: " in faults(Bigram, "greedy", "convolution")


def test_a_broken_step_is_found() -> None:
    with mutants.stepped_to_the_snapshot_before():
        assert "caches: " in faults(Bigram, "greedy", options={"verify": "step"})


@pytest.mark.parametrize("model", ["rotating", "quantized-kv"])
def test_rounds_that_are_too_wide_for_a_cache_are_found(model: str) -> None:
    with mutants.no_limit_of_the_width():
        faults(Bigram, "greedy", model)


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("drafter_keeps_rejected_entries", "rounds_leave_no_trace"),
        ("drafter_loses_the_last_pair", "rounds_leave_no_trace"),
        ("drafter_not_rewound", "rewinds"),
        ("drafter_rewound_one_token_short", "rewinds"),
        ("drafter_not_rewound", "suspended_after_rewinding"),
    ],
)
def test_a_broken_drafter_with_a_head_is_found(bug: str, check: str) -> None:
    with getattr(mutants, bug)():
        faults(with_a_head, check, "gated-delta")


def test_a_check_in_which_nothing_is_accepted_means_nothing() -> None:
    """Here, because nothing is drafted."""
    with patch.object(propose.Proposer, "__call__", lambda *a: Proposal.of([])):
        message = faults(Bigram, "greedy")
    says = "greedy: nothing was accepted or rejected, so that the check means nothing"
    assert says in message


class Hungry(Silent):
    """Needs hidden states."""

    needs_hidden = True

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is not None and hidden.shape == (*tokens.shape, 64)


def test_models_without_hidden_states_are_left_out_and_that_is_said() -> None:
    report = check_drafter(Hungry, only=["greedy"])
    assert set(BY_NAME) - set(report.models) == {"convolution"}
    assert "note: model convolution was left out: no final norm" in report.summary()


def _shifted(stock: Any) -> Any:
    def keep(self: Any, tokens: Any, hidden: Any, row: int) -> None:
        hidden = None if hidden is None else mx.roll(hidden, 1, axis=1)
        stock(self, tokens, hidden, row)

    return keep


def _always_given(stock: Any) -> Any:
    def observe(self: Any) -> None:
        self._unobserved = [
            leg._replace(all_hidden=mx.zeros((1, len(leg.inputs), 64)), row=0)
            for leg in self._unobserved
        ]
        stock(self)

    return observe


def test_hidden_states_of_other_tokens_are_found() -> None:
    with patch.object(Drafting, "keep", _shifted(Drafting.keep)):
        message = faults(Hungry, "hidden_states")
    assert re.search(r"shown with token \d+ is not the target's there", message)


def test_hidden_states_for_who_needs_none_are_found() -> None:
    with patch.object(Drafting, "observe", _always_given(Drafting.observe)):
        assert "a hidden state was shown with token 11" in faults(
            Bigram, "hidden_states"
        )


# --- models -------------------------------------------------------------------------


def test_the_models_have_every_kind_of_cache() -> None:
    from mlx_lm.models import cache

    found = set()
    for tiny in tiny_models():
        made = oracle.stock(
            tiny.build(), [1, 2], 20, caches=tiny.caches(tiny.build()), **tiny.arguments
        )
        found |= {type(c) for c in made.caches}
    wanted = {"KVCache", "RotatingKVCache", "ChunkedKVCache", "QuantizedKVCache"}
    wanted |= {"ArraysCache", "CacheList"}
    assert {getattr(cache, name) for name in wanted} <= found


def test_no_model_says_one_thing_only() -> None:
    for tiny in tiny_models():
        made = oracle.stock(tiny.build(), [3, 1, 4], 24, **tiny.arguments)
        assert len(set(made.tokens)) > 3, tiny.name


def test_a_model_of_another_vocabulary() -> None:
    def build() -> Any:
        model = Spec("qwen3", tied=False).build()
        model.lm_head.weight = model.lm_head.weight[:50]
        model.model.embed_tokens.weight = model.model.embed_tokens.weight[:50]
        return model

    check_drafter(Silent, only=["greedy", "rounds"], models=[TinyModel("small", build)])


# --- pytest and the command line ----------------------------------------------------

PLUGIN = ["-p", "mlx_lm_mtp.testing.pytest_plugin", "-p", "no:cacheprovider"]
USES = """
import sys
before = {m.partition(".")[0] for m in sys.modules}

def test_nothing_heavy_was_imported():
    assert not before & {"mlx", "mlx_lm", "transformers", "numpy"}

def test_fixtures(check_drafter, tiny_models):
    class Wrong:
        name, needs_hidden = "wrong", False
        def begin(self): pass
        def prefill(self, tokens, hidden): pass
        def observe(self, tokens, hidden): raise OSError("no such device")
        def draft(self, token, k): pass
    check_drafter(Wrong, only=["greedy"], models=tiny_models[1:2])
"""


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    import os

    path = os.pathsep.join([str(ROOT), str(ROOT / "boot"), str(ROOT / "tests")])
    more = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | more,
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_the_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_uses.py").write_text(USES)
    done = python("-W", "error", "-m", "pytest", "-q", *PLUGIN, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout
    assert "DrafterFault: drafter 'wrong' breaks its contract in 1 of 1" in done.stdout
    off = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "fixture 'check_drafter' not found" in off.stdout


def test_the_pytest_plugin_is_registered() -> None:
    from importlib.metadata import entry_points

    (entry,) = (e for e in entry_points(group="pytest11") if e.name == "mlx_lm_mtp")
    assert entry.value == "mlx_lm_mtp.testing.pytest_plugin"


def test_the_kit_needs_no_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from mlx_lm_mtp.testing import *; from mlx_lm_mtp.testing import CHECKS\n"
        "import mlx_lm_mtp.testing as kit; print([getattr(kit, n) for n in dir(kit)])"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx_lm_mtp import plugins
    from mlx_lm_mtp.testing import __main__ as command

    def run(name: str, *more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["testing", name, *more])
        command.main()

    host = plugins.DrafterPlugins()
    for name, factory in {"good": Bigram, "bad": bigram.AllOrNothing}.items():
        host.registrations[name] = plugins.Registration(name, factory, "mine", "1.0")
    monkeypatch.setattr(plugins, "drafters", lambda: host)
    run("good", "--only", "closed")
    assert "drafter 'bigram': 1 checks on 11 models" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        run("bad", "--only", "closed")
    assert "closed on gated-delta: ValueError" in str(stop.value.code)
    with pytest.raises(SystemExit) as stop:
        run("unknown")
    assert stop.value.code == 2


# --- what the documentation shows ---------------------------------------------------

PAGE = ROOT / "docs" / "testing-drafters.md"


def test_every_check_is_documented() -> None:
    _, _, table = PAGE.read_text().partition("## What is checked")
    documented = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", table, re.MULTILINE)
    assert documented == list(CHECKS)
    for check in CHECKS.values():
        assert check.contract.endswith(".")


def test_what_the_page_shows_runs(tmp_path: Path) -> None:
    file, more = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "test_last_seen.py").write_text(file)
    done = python("-W", "error", "-m", "pytest", "-q", *PLUGIN, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout
    done = python("-c", file + more)
    assert "2 checks on 2 models" in done.stdout, done.stderr


def test_a_report_is_plain_data() -> None:
    report = check_drafter(Silent, only=["taken_back"], models=kinds("kv"))
    assert isinstance(report, Report) and hash(report)
