"""Counts which token has followed which, and drafts the most frequent ones."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from mlx_lm_mtp import Proposal, hookimpl, option


@dataclass(frozen=True)
class Options:
    least: int = option(2, least=1, help="times that a token must have followed")


class Followers:
    name = "followers"
    needs_hidden = False

    def __init__(self, least):
        self.least = least

    def begin(self):
        self.followers, self.last = defaultdict(Counter), None

    def prefill(self, tokens, hidden):
        for token in tokens.tolist()[0]:
            self.followers[self.last][token] += 1
            self.last = token

    observe = prefill

    def draft(self, token, k):
        path = token.tolist()[0]
        while len(path) <= k and (counts := self.followers.get(path[-1])):
            follower, times = counts.most_common(1)[0]
            if times < self.least:
                break
            path.append(follower)
        return Proposal.of(path[1:])


@hookimpl
def mlx_lm_mtp_register_drafters(register):
    register("followers", lambda c: Followers(c.own.least), options=Options, contract=1)
