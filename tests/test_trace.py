"""Traces: written line by line, read again, and replayed without a model."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm
import mutants
import oracle
import pytest
from checks import PROMPT, drafted, model_of
from mlx_lm.sample_utils import make_sampler
from scripted import Branching, right_where
from test_gaps import impure
from tiny import Spec

from mlx_lm_mtp import DraftOptions, Tally, cli, replay
from mlx_lm_mtp import depth as rules
from mlx_lm_mtp.drafters.base import CHAIN, Proposal, Wanted
from mlx_lm_mtp.errors import InvalidOption
from mlx_lm_mtp.profile import Lap
from mlx_lm_mtp.replay import accepted_of, depths, differing
from mlx_lm_mtp.rounds import Nearest, Round
from mlx_lm_mtp.trace import Recorded, Trace, read

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
TOKENS = 20
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paths": {"paths": 3},
    "rescued and probed": {"rescue": 2, "probe": 2},
    "audited": {"audit": 7},
    "by confidence": {"depth": "confidence", "tau": 0.5},
    "read once": {"depth": "confidence", "tau": 0.5, "reads": "once"},
}


def traced(file: Path, *, sampler: Any = None, stop: Any = None, **how: Any) -> Tally:
    """A generation of the tiny model, traced."""
    model, tally = model_of(Spec("qwen3_5")), Tally()
    sampled = {"sampler": sampler, "seed": 5}
    truth = oracle.stock(model, PROMPT, TOKENS + 8, **sampled).tokens
    options = DraftOptions(**how)
    header = {"drafter": "scripted", "num_draft_tokens": 3}
    trace = Trace(file, header | {"options": options.to_dict()})
    drafter = Branching(truth, right_where("110"))
    more = {"options": options, "stats": tally, "stop": stop, "trace": trace}
    drafted(model, PROMPT, TOKENS, drafter, **sampled, **more)
    return tally


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("sampler", [None, make_sampler(1.0), impure])
@pytest.mark.parametrize("way", WAYS)
def test_a_replay_comes_to_the_same(way: str, sampler: Any, file: Path) -> None:
    tally = traced(file, sampler=sampler, **WAYS[way])
    (recorded,) = read(file)
    assert [*differing(recorded)] == []
    assert recorded.stats == json.loads(json.dumps(tally.stats.to_dict()))
    assert len(recorded.rounds) == tally.verifies
    said = [token for done in recorded.rounds for token in done.tokens]
    stock = oracle.stock(
        model_of(Spec("qwen3_5")), PROMPT, TOKENS, sampler=sampler, seed=5
    )
    assert said == stock.tokens
    gaps = [n for done in recorded.rounds for n in done.yielded]
    assert None not in gaps and len(gaps) == TOKENS
    assert all(done.seconds > 0 for done in recorded.rounds)


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_a_stopped_generation_is_replayed_as_well(stop: int, file: Path) -> None:
    traced(file, stop=stop)
    (recorded,) = read(file)
    assert [*differing(recorded)] == [] and recorded.rounds[-1].stopped


@pytest.mark.parametrize(
    "mutant", [mutants.wrong_drafts_accepted, mutants.last_draft_never_accepted]
)
def test_planted_bugs_show_in_a_replay(mutant: mutants.Mutant, file: Path) -> None:
    with mutant():
        traced(file)
    (recorded,) = read(file)
    assert "accepted, and the rule accepts" in next(differing(recorded))


CHANGES: dict[str, tuple[Callable[[Round], Round], str]] = {
    "accepted": (lambda r: replace(r, accepted=r.accepted + 1), "the rule accepts"),
    "target": (lambda r: replace(r, targets=(0, *r.targets[1:])), "the rule accepts"),
    "drafted": (lambda r: replace(r, drafted=0), "do not count as drafted"),
    "gap": (lambda r: replace(r, first=Nearest(0.0, 1, 2)), "gaps: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_found(change: str, file: Path) -> None:
    traced(file)
    (recorded,) = read(file)
    tampered, said = CHANGES[change]
    recorded.rounds[0] = tampered(recorded.rounds[0])
    assert any(said in line for line in differing(recorded))


def test_a_depth_beyond_its_confidences_is_found() -> None:
    done = Round(
        3, 3, 3, targets=(1, 2, 3, 4), paths=((1, 2, 3),), confidences=(0.9, 0.1, 0.9)
    )
    header = {"options": {"depth": "confidence", "tau": 0.5}}
    found = [*differing(Recorded(header, [done]))]
    assert len(found) == 1 and "confidences allow 2 at tau=0.5" in found[0]


def test_the_rule_that_accepts_is_asked_over_paths() -> None:
    paths = ((1, 2, 3), (1, 5, 6), (7, 5, 6))
    assert accepted_of(Round(3, 3, 0, paths=paths, targets=(1, 5, 9, 4))) == 2
    assert accepted_of(Round(3, 3, 0, paths=paths, targets=(7, 5, 6, 4))) == 3
    assert accepted_of(Round(3, 3, 0, paths=paths, targets=(8, 2, 3, 4))) == 0
    assert accepted_of(Round(paths=((),), targets=(8,))) == 0


# --- depth ------------------------------------------------------------------------


class Rewinds(Branching):
    """Is asked for the next round while this one is yielded."""

    gives = Branching.gives | {"rewind"}
    asked = False

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        self.asked = True
        return super().draft(token, k, wanted)

    def rewind(self, tokens: int) -> None:
        self.seen = self.seen[: len(self.seen) - tokens]


class Drawn(Lap):
    """Rounds take what is drawn, and half of it more if this drafter was asked."""

    def __init__(self, seed: int, drafter: Any) -> None:
        super().__init__()
        self._drawn, self._drafter = random.Random(seed), drafter

    def lap(self) -> float:
        seconds = 0.015 if self._drafter.asked else 0.01
        self._drafter.asked = False
        return seconds * self._drawn.lognormvariate(0, 0.1)


def deep(file: Path, *stops: int | None, pattern: str = "1110", **how: Any) -> Any:
    """Generations of one model, each of which begins with what those before left."""
    model = Spec("qwen3_5").build()
    truth = oracle.stock(model, PROMPT, 70).tokens
    options = DraftOptions(**how)
    header = {"drafter": "scripted", "num_draft_tokens": 3}
    for seed, stop in enumerate(stops):
        trace = Trace(file, header | {"options": options.to_dict()})
        more = {"options": options, "stop": stop, "trace": trace}
        drafter = Rewinds(truth, right_where(pattern))
        clock = functools.partial(Drawn, seed, drafter)
        with patch("mlx_lm_mtp.generate.Lap", clock):
            made = drafted(model, PROMPT, 60, drafter, **more)
        assert made.tokens == truth[: stop or 60]
    return read(file)


@pytest.mark.throughput
@pytest.mark.parametrize("pattern", ["1", "1110", "10", "0"])
def test_what_a_depth_chose_is_chosen_again(pattern: str, file: Path) -> None:
    """In a second generation as well, and in those that are broken off."""
    found = deep(file, None, None, 31, 32, 33, pattern=pattern)
    assert [[*differing(recorded)] for recorded in found] == [[]] * 5
    ks = [done.k for recorded in found for done in recorded.rounds]
    assert len({*ks}) > 1 and {d.parked for r in found for d in r.rounds} > {""}
    first, second = found[:2]
    assert first.known["costs"] == {} and len(second.known["costs"]["0"]) >= 2
    ahead = max(len(asked) for recorded in found for asked in recorded.asked)
    assert ahead == (1 if pattern == "0" else 2)


@pytest.mark.throughput
@pytest.mark.parametrize("how", [{"rescue": 2}, {"paths": 2}])
def test_a_depth_beside_other_strategies(how: dict[str, Any], file: Path) -> None:
    (recorded,) = deep(file, None, pattern="110", **how)
    assert [*differing(recorded)] == [] and recorded.known is not None
    rescued = any(done.rescue is not None for done in recorded.rounds)
    assert rescued == ("rescue" in how)
    assert max(len(done.paths) for done in recorded.rounds) == how.get("paths", 1)


def test_a_depth_that_is_always_k_leaves_nothing_to_ask(file: Path) -> None:
    traced(file)
    (recorded,) = read(file)
    assert recorded.known is None and recorded.asked[0][0] == (3, 3)
    assert depths(recorded) == "depth: was not chosen by what yields most"


CONSTANTS = {
    "depth._MARGIN": 3.0,
    "depth._TRIAL": 4,
    "depth._SHARE": 0.5,
    "depth.PARKED": "for no reason",
    "acceptance._CHANGES": 0.5,
    "costs._ENOUGH": 4,
}


@pytest.mark.throughput
@pytest.mark.parametrize("name", CONSTANTS)
def test_another_rule_for_the_depth_is_found(name: str, file: Path) -> None:
    pattern = "0" if name in ("depth._SHARE", "depth.PARKED") else "1110"
    found = deep(file, None, None, pattern=pattern)
    with patch(f"mlx_lm_mtp.{name}", CONSTANTS[name]):
        lines = [line for recorded in found for line in differing(recorded)]
    assert lines and all("derived" in line for line in lines)
    said = "parked, " if name == "depth.PARKED" else " chosen of "
    assert any(said in line for line in lines)


@pytest.mark.throughput
def test_a_depth_that_is_told_too_early_is_found(file: Path) -> None:
    """What is drafted ahead was chosen before the round before it was known."""

    def early(recorded: Recorded, depth: rules.Throughput) -> Any:
        for done, asked in zip(recorded.rounds, recorded.asked, strict=True):
            depth.take(done)
            yield [(depth.choose(most), depth.parked) for most, _ in asked]

    found = deep(file, None)
    with patch.object(replay, "answers", early):
        assert [*differing(found[0])]


@pytest.mark.throughput
def test_a_choice_that_was_changed_is_found(file: Path) -> None:
    (recorded,) = deep(file, None)
    number, done = next((n, d) for n, d in enumerate(recorded.rounds) if d.k == 3)
    recorded.rounds[number] = replace(done, k=2, parked="tired")
    lines = [*differing(recorded)]
    assert f"verify {number}: k=3 was chosen, and 2 asked for" in lines
    assert f"verify {number}: parked, 'tired' recorded, '' derived" in lines
    recorded.rounds[number] = done
    recorded.asked[0] = ((3, 1),)
    assert "verify 0: k=1 chosen of 3, and 0 derived" in differing(recorded)


@pytest.mark.throughput
def test_what_each_depth_was_taken_to_yield(file: Path) -> None:
    (recorded,) = deep(file, None, pattern="1")
    head, *rows = [line.split() for line in depths(recorded).splitlines()]
    assert head[:2] == ["k", "rounds"] and [row[0] for row in rows] == [*"0123"]
    assert sum(int(row[1]) for row in rows) == len(recorded.rounds)
    assert [float(told) for told in rows[0][2:]] == [1.0, 1.0, 1.0]
    for _, _, tokens, rounds, rate in rows:
        wanted = float(tokens) / float(rounds.strip("~"))
        assert float(rate) == pytest.approx(wanted, rel=0.02)
    recorded.rounds, recorded.asked = recorded.rounds[:1], recorded.asked[:1]
    assert depths(recorded) == "depth: plain decoding was not measured yet"


# --- the file ---------------------------------------------------------------------


def test_a_killed_run_leaves_what_it_has_done(file: Path) -> None:
    """Lines can be read as soon as they are written; half a line is left out."""
    trace = Trace(file, {"options": {}, "drafter": "x", "num_draft_tokens": 1})
    nan = Nearest(float("nan"), 1, 2)
    for n in range(1, 4):
        trace.add(Round(token=n, paths=((),), nearest=(nan,)))
        assert len(read(file)[0].rounds) == n
    with file.open("a") as broken:
        broken.write('{"drafted": 0, "acc')
    (recorded,) = read(file)
    assert [done.token for done in recorded.rounds] == [1, 2, 3]
    assert recorded.stats is None and [*differing(recorded)] == []
    assert recorded.rounds[0].nearest[0].gap != recorded.rounds[0].nearest[0].gap


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk")
def test_a_full_disk_is_told_at_once() -> None:
    with pytest.raises(InvalidOption, match="cannot be written .No space left"):
        Trace(Path("/dev/full"), {})


def test_a_disk_that_becomes_full_ends_the_trace_and_not_the_text(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, line: dict[str, Any]) -> None:
        if "trace" not in line:
            raise InvalidOption(f"draft trace {path} cannot be written")

    monkeypatch.setattr("mlx_lm_mtp.trace._append", full)
    with pytest.warns(RuntimeWarning, match="cannot be written") as told:
        tally = traced(file)
    assert tally.tokens == TOKENS and len(told) == 1


HEADER = '{"trace": 1, "drafter": "x", "num_draft_tokens": 1, "options": {}}'
KNOWN = json.dumps(rules.Known().to_dict() | {"costs": {"0": [0.25]}})
DAMAGES = [
    ("0.25", "null"),
    ("0.25", "0"),
    ('"parked": 0', '"parked": Infinity'),
    ("[0.25]", "0.25"),
    ('"0"', '"none"'),
    ('{"0": [0.25]}', "[]"),
    ('"parked": 0', '"parked": "half"'),
    ('"drafted": []', '"drafted": 5'),
    ('"accepted": []', '"accepted": [{"now": [1], "past": [1], "usual": [1]}]'),
]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no trace"),
        ('{"trace": 9}\n', "is a trace of format 9, and this is for format 1"),
        ('{"stats": {}}\n', "line 1 is neither a header nor a verify"),
        (f'{HEADER}\nhello\n{{"stats": {{}}}}\n', "line 2 is neither a header nor"),
        (f'{HEADER}\n{{"drafted": 1}}\n', "line 2 is neither a header nor a verify"),
        ('{"trace": 1}\n', "damaged header in line 1 .KeyError: 'options'"),
        (HEADER.replace("{}", '{"tau": 7}'), "damaged header in line 1 .Inv.*tau.*7"),
        (HEADER.replace("{}", "[1]"), "damaged header in line 1"),
        (f'{HEADER}\n{{"known": {{}}}}\n', "damaged header in line 2 .KeyError: 'ac"),
        *(
            (f'{HEADER}\n{{"known": {KNOWN.replace(*change)}}}\n', "damaged header in")
            for change in DAMAGES
        ),
    ],
)
def test_what_is_no_trace_is_told(text: str, said: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(InvalidOption, match=said):
        read(file)
    with pytest.raises(InvalidOption, match="cannot be read: No such file"):
        read(file.with_name("none"))


# --- the commands -----------------------------------------------------------------


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str, str]]:
    """One of our scripts with these arguments: exit code, output, error."""

    def script(entry: Any, *args: Any) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", *map(str, args)])
        code: Any = 0
        try:
            entry()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return script


def generating(file: Path, *more: Any) -> tuple[Any, ...]:
    options = ("--mtp", "--max-tokens", 30, "--draft-trace", file)
    return ("--model", BUNDLED, "--prompt", "class Node:\n", *options, *more)


@pytest.mark.usefixtures("plugin")
def test_from_the_command_line(script: Any, file: Path) -> None:
    file.write_text("an older one")
    code, out, _ = script(cli.generate, *generating(file, "--temp", 0.7))
    assert code == 0 and "smallest gaps" in out
    code, out, _ = script(cli.main, "replay", file)
    assert code == 0 and out.endswith("replayed: no differences\n")
    header = json.loads(file.read_text().splitlines()[0])
    assert header["model"] == str(BUNDLED) and header["drafter"] == "mtp"
    assert {*header["versions"]} == {"mlx", "mlx-lm", "mlx-lm-mtp"}
    file.write_text(file.read_text().replace('"drafted": 3,', '"drafted": 2,'))
    code, out, _ = script(cli.main, "replay", file)
    assert code == 1 and "difference" in out.splitlines()[-1]


@pytest.mark.throughput
@pytest.mark.usefixtures("plugin")
def test_depths_from_the_command_line(script: Any, file: Path) -> None:
    code, _, _ = script(cli.generate, *generating(file))
    assert code == 0
    code, out, _ = script(cli.main, "replay", file, "--depth")
    assert code == 0 and out.endswith("replayed: no differences\n")
    assert out.splitlines()[1].split()[:4] == ["k", "rounds", "tokens", "a"]
    text = file.read_text()
    file.write_text(text.replace('"asked": [[3, 0]]', '"asked": [[3, 2]]', 1))
    code, out, _ = script(cli.main, "replay", file)
    assert code == 1 and "k=2 chosen of 3, and 0 derived" in out
    file.write_text(text.replace('"acceptance"', '"unacceptable"', 1))
    code, out, err = script(cli.main, "replay", file)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "damaged header in line 2 (KeyError: 'acceptance'); name a file" in err


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("k", [0, 2])
def test_generations_are_appended(k: int, file: Path) -> None:
    model, tokenizer = mlx_lm.load(str(BUNDLED))
    more = {"draft": "mtp", "num_draft_tokens": k, "draft_trace": str(file)}
    texts = [
        mlx_lm.generate(model, tokenizer, "def f(", max_tokens=9, **more)
        for _ in range(2)
    ]
    found = read(file)
    assert len(found) == 2 and texts[0] == texts[1]
    assert [[*differing(recorded)] for recorded in found] == [[], []]
    assert found[0].stats["tokens"] == sum(len(r.tokens) for r in found[0].rounds)


@pytest.mark.usefixtures("plugin")
def test_what_cannot_be_written_is_told_before_anything_is_loaded(
    script: Any, file: Path
) -> None:
    nowhere = Path("/nowhere/trace")
    arguments = ("--model", "/none", "--mtp", "--draft-trace", nowhere)
    code, _, err = script(cli.generate, *arguments)
    assert code == 2 and err.splitlines()[-1].endswith(
        "draft trace /nowhere/trace cannot be written (No such file or directory); "
        "name a file in a folder that exists and is yours, on a disk that has room."
    )
    with pytest.raises(InvalidOption, match="cannot be written"):
        mlx_lm.stream_generate(
            model_of(Spec("qwen3_5")), None, [1], draft="mtp", draft_trace=nowhere
        )
    code, _, err = script(cli.generate, "--model", "/none", "--draft-trace", file)
    assert code == 2 and "--draft-trace is of no use without --mtp" in err
    code, _, err = script(cli.main, "replay", nowhere)
    assert code == 2 and "/nowhere/trace cannot be read" in err
