"""The contract, checked by the kit; and what this drafter is for."""

import followers
import mlx.core as mx


def test_contract(check_drafter):
    report = check_drafter(lambda context: followers.Followers(least=1))
    assert report.accepted > 0


def test_what_has_followed_often_is_drafted():
    drafter = followers.Followers(least=2)
    drafter.begin()
    drafter.prefill(mx.array([[1, 2, 1, 2, 3]]), None)
    assert drafter.draft(mx.array([[1]]), 3).tokens.tolist() == [[2]]
