"""Several drafters in turn: who drafted what, and what they cannot do together."""

from __future__ import annotations

from typing import Any

import checks
import mlx.core as mx
import pytest
import tiny
from mlx_lm.sample_utils import make_sampler
from scripted import Scripted

from mlx_lm_mtp import DraftOptions, Tally, build, plugins
from mlx_lm_mtp.drafters.base import DraftContext, Drafter, Proposal
from mlx_lm_mtp.drafters.chain import ChainDrafter
from mlx_lm_mtp.drafters.draft_model import DraftModelDrafter
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.drafters.ngram import NGramDrafter, NGramOptions
from mlx_lm_mtp.errors import DrafterError, InvalidOption, UnknownDrafter

PROMPT = (5, 9, 30, 2, 77, 5, 9, 30, 2, 77, 5, 9)
SPEC = tiny.Spec()
ONE = NGramOptions(shortest=1)


def head() -> MTPDrafter:
    return MTPDrafter(checks.head_for(checks.model_of(SPEC)))


class Says(Scripted):
    """Drafts these tokens, whatever went before, and notes down what it is asked."""

    gives = frozenset({"continues", "rewind"})

    def __init__(self, name: str, *tokens: int) -> None:
        self.name = name
        self.says = tokens
        self.asked: list[tuple[list[int], int]] = []
        super().__init__([])

    def draft(self, token: mx.array, k: int) -> Proposal:
        return self.draft_behind(token, k)

    def draft_behind(self, path: mx.array, k: int) -> Proposal:
        self.asked.append((path.tolist()[0], k))
        return Proposal.of(self.says)

    def rewind(self, tokens: int) -> None:
        del self.seen[len(self.seen) - tokens :]


def test_each_goes_on_behind_the_one_before() -> None:
    a, b, c = Says("a", 1, 2), Says("b"), Says("c", 3, 4, 5)
    chain = ChainDrafter([(a, 3), (b, 1), (c, None)])
    proposal = chain.draft(mx.array([[9]]), 4)
    assert proposal.tokens.tolist() == [[1, 2, 3, 4]]
    assert proposal.origins == ("a", "a", "c", "c")
    assert a.asked == [([9], 3)]
    assert b.asked == [([9, 1, 2], 1)]
    assert c.asked == [([9, 1, 2], 2)]


def test_nobody_is_asked_for_nothing() -> None:
    a, b = Says("a", 1, 2, 3), Says("b", 4)
    assert ChainDrafter([(a, None), (b, None)]).draft(mx.array([[9]]), 3).origins == (
        ("a",) * 3
    )
    assert b.asked == []


def test_all_see_what_is_kept() -> None:
    parts = [Says("a", 1), Says("b", 2)]
    chain = ChainDrafter([(part, None) for part in parts])
    chain.prefill(mx.array([[3, 4]]), None)
    chain.observe(mx.array([[5, 6]]), None)
    chain.rewind(1)
    assert [(part.prompt, part.seen) for part in parts] == [([3, 4], [5])] * 2
    chain.begin()
    assert [(part.prompt, part.seen) for part in parts] == [([], [])] * 2


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("stop", [None, 1, 4, 9])
def test_tokens_and_caches_are_stocks(sampled: bool, stop: int | None) -> None:
    other = checks.model_of(tiny.Spec("qwen3_5", seed=1))
    chains = (
        lambda truth: ChainDrafter([(head(), 2), (NGramDrafter(ONE), None)]),
        lambda truth: ChainDrafter(
            [(NGramDrafter(ONE), 1), (DraftModelDrafter(other), 2), (NGramDrafter(), 4)]
        ),
    )
    for chain in chains:
        found = checks.generation_differences(
            checks.model_of(SPEC),
            PROMPT,
            24,
            chain,
            options=DraftOptions(num_draft_tokens=5),
            sampler=(lambda: make_sampler(0.8)) if sampled else None,
            stop=stop,
        )
        assert found == []


def test_origins_are_counted() -> None:
    model, stats = checks.model_of(tiny.Spec("qwen3")), Tally()
    truth = checks.oracle.stock(model, PROMPT, 40).tokens

    class Right(Scripted):
        gives = frozenset({"continues"})

        def draft_behind(self, path: mx.array, k: int) -> Proposal:
            start = len(self.seen) + path.shape[1]
            return Proposal.of([self._say(i) for i in range(start, start + k)])

    first, second = Scripted(truth), Right(truth, lambda i: i % 2 == 0)
    first.name, second.name = "first", "second"
    checks.drafted(
        model,
        PROMPT,
        30,
        ChainDrafter([(first, 2), (second, None)]),
        options=DraftOptions(num_draft_tokens=4),
        stats=stats,
    )
    drafted, accepted = stats.origin_drafted, stats.origin_accepted
    assert set(drafted) == {"first", "second"}
    assert accepted["first"] == drafted["first"]
    assert accepted["second"] < drafted["second"]
    assert drafted.total() == stats.drafted.total()
    assert accepted.total() == stats.accepted.total()
    rates = stats.to_dict()["acceptance_by_origin"]
    assert rates["first"] == 1.0 > rates["second"]
    assert f"100.0% of {drafted['first']} by first" in stats.summary()


@pytest.mark.parametrize("origins", [("a",), ("a", 1), ("a", "b", "c")])
def test_origins_are_checked(origins: Any) -> None:
    class Wrong(Scripted):
        def draft(self, token: mx.array, k: int) -> Proposal:
            return Proposal(mx.array([[1, 2]]), origins=origins)

    with pytest.raises(DrafterError, match="one name for each token"):
        checks.drafted(checks.model_of(SPEC), PROMPT, 9, Wrong([]))


def test_a_wrong_proposal_names_the_part() -> None:
    class Wrong(Says):
        def draft_behind(self, path: mx.array, k: int) -> Any:
            return Proposal(mx.array([[0.5]]))

    chain = ChainDrafter([(Says("a", 1), None), (Wrong("b"), None)])
    with pytest.raises(DrafterError, match="drafter 'b' proposed"):
        checks.drafted(checks.model_of(SPEC), PROMPT, 9, chain)


def test_it_gives_what_its_parts_give() -> None:
    head_first = ChainDrafter([(head(), 2), (NGramDrafter(), None)])
    assert head_first.gives == {"caches", "logprobs", "head", "readout", "rewind"}
    assert head_first.needs_hidden
    plain = Scripted([])
    assert ChainDrafter([(plain, 2), (NGramDrafter(), None)]).gives == frozenset()
    with pytest.raises(InvalidOption, match="'mtp' cannot continue"):
        ChainDrafter([(NGramDrafter(), 2), (head(), None)])


# --- by name ----------------------------------------------------------------------


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters a and b, beside the built-in ones."""

    class Plugin:
        @plugins.hookspecs.hookimpl
        def mlx_lm_mtp_register_drafters(self, register: Any) -> None:
            for name in ("a", "b"):
                register(name, lambda context, name=name: Says(name, 1, 2))

    host = plugins.DrafterPlugins()
    host.load_entry_points()
    host.add(Plugin(), "my-dist")
    monkeypatch.setattr(plugins, "drafters", lambda: host)


def built(drafters: str, **more: Any) -> Drafter:
    options = DraftOptions.of({"chain.drafters": drafters, **more}, 3)
    drafter = build.resolve("chain", checks.model_of(SPEC), None, options)
    assert drafter is not None
    return drafter


@pytest.mark.usefixtures("mine")
def test_parts_are_built_by_name() -> None:
    chain: Any = built(" a : 2 , b,ngram:3", **{"ngram.shortest": 5})
    assert [(d.name, most) for d, most in chain.parts] == [
        ("a", 2),
        ("b", None),
        ("ngram", 3),
    ]
    assert chain.parts[2][0].options.shortest == 5


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("drafters", "error", "said"),
    [
        ("a,", InvalidOption, "has the part ''"),
        ("a:0", InvalidOption, "has the part 'a:0'"),
        ("a:many,b", InvalidOption, "has the part 'a:many'"),
        ("a,c", UnknownDrafter, "unknown drafter 'c'"),
        ("a,a", InvalidOption, "drafter 'a' is to draft twice"),
        ("chain", InvalidOption, "drafter 'chain' is to draft twice"),
        ("", InvalidOption, "has the part ''"),
    ],
)
def test_parts_that_cannot_be(drafters: str, error: type, said: str) -> None:
    with pytest.raises(error) as raised:
        built(drafters)
    assert said in str(raised.value)


@pytest.mark.usefixtures("mine")
def test_options_of_who_does_not_draft_are_refused() -> None:
    with pytest.raises(InvalidOption, match="ngram.shortest=5 is of no use without"):
        built("a,b", **{"ngram.shortest": 5})


def test_a_context_made_by_hand_builds_nobody() -> None:
    context = DraftContext(checks.model_of(SPEC), None, DraftOptions())
    with pytest.raises(DrafterError, match="'ngram' cannot be built"):
        context.build("ngram")
