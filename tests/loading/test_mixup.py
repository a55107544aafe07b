"""mixup: partners and shares are those of the step, whichever rank has the row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading.test_requests import requests_of
from trainer.loading.epoch_plan import Mixing, StaticPlan
from trainer.loading.mixup import draw_betas, partner_rows
from trainer.loading.sample_order import derive_stream

STREAM = derive_stream(0, "standard")


def plan_of(selected, batch, candidates=0, alpha=0.4):
    everyone = np.random.default_rng(selected).permutation(200)
    parts = np.split(everyone, [selected, selected + candidates])
    return StaticPlan(
        STREAM, parts[0], batch, 2, parts[1], candidates_from=1, mixing=Mixing(alpha) if alpha else None
    )


def mixed_rows(request):
    """For each row that counts: its id, its partner's id, its share, and the box of the partner."""
    mix = request.mix
    return [
        (
            int(request.ids[row]),
            int(request.ids[mix.partners[row]]),
            float(mix.shares[row]),
            tuple(request.draws.boxes[mix.partners[row]].tolist()),
        )
        for row in range(request.real_rows)
    ]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 60), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_partners_and_shares_do_not_depend_on_the_number_of_ranks(selected, batch, candidates, world):
    plan = plan_of(selected, batch, candidates)
    alone = requests_of(plan)
    ranks = [requests_of(plan, rank=rank, world=world) for rank in range(world)]
    for number, whole in enumerate(alone):
        parts = [requests[number] for requests in ranks]
        assert sorted(row for part in parts for row in mixed_rows(part)) == sorted(mixed_rows(whole))
        assert len(whole.ids) == whole.real_rows  # one rank has every partner already
        for part in parts:
            if part.real_rows:
                assert len(part.ids) - part.real_rows <= 2  # one more image of S and one of C
            assert len(set(part.ids.tolist())) == len(part.ids)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_every_sample_is_a_partner_once_and_of_its_own_kind(selected, batch, candidates):
    plan = plan_of(selected, batch, candidates)
    of_s = set(plan.selected.tolist())
    for request in requests_of(plan):
        rows = mixed_rows(request)
        assert sorted(row[1] for row in rows) == sorted(row[0] for row in rows)
        assert all((own in of_s) == (partner in of_s) for own, partner, *_ in rows)


def test_a_sample_has_another_partner_and_share_in_another_epoch():
    plan = plan_of(selected=60, batch=20)
    epochs = [{row[0]: row[1:3] for request in part for row in mixed_rows(request)} for part in _halves(plan)]
    assert epochs[0].keys() == epochs[1].keys()
    assert sum(epochs[0][sample][0] == epochs[1][sample][0] for sample in epochs[0]) < 10
    assert sum(epochs[0][sample][1] == epochs[1][sample][1] for sample in epochs[0]) == 0


def _halves(plan):
    requests = requests_of(plan)
    return requests[: plan.steps_per_epoch], requests[plan.steps_per_epoch :]


def test_a_step_of_one_sample_is_mixed_with_itself():
    assert partner_rows(np.array([0, 1])).tolist() == [0]
    assert partner_rows(np.array([0, 0])).tolist() == []
    assert partner_rows(np.array([0, 3, 3, 5])).tolist() == [1, 2, 0, 4, 3]


def test_a_restart_asks_for_the_same_mixture():
    plan = plan_of(selected=50, batch=8)
    for whole, resumed in zip(requests_of(plan)[9:], requests_of(plan, first=9), strict=True):
        assert mixed_rows(whole) == mixed_rows(resumed)


def test_without_mixup_nothing_is_mixed():
    assert all(request.mix is None for request in requests_of(plan_of(20, 8, alpha=0.0)))


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.8, 1.0, 2.5, 32.0])
def test_shares_follow_the_beta_distribution(alpha):
    shares = draw_betas(STREAM, 3, np.arange(20_000), alpha)
    assert ((shares >= 0) & (shares <= 1)).all()
    reference = np.random.default_rng(1).beta(alpha, alpha, 200_000)
    levels = np.concatenate([[1e-9, 1e-6, 1e-3], np.linspace(0.01, 0.99, 99), [1 - 1e-3, 1 - 1e-6]])
    below = [(sample[:, None] <= levels).mean(axis=0) for sample in (shares, reference)]
    # Kolmogorov-Smirnov for two samples, at the level of 0.1 %
    assert np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(1 / 20_000 + 1 / 200_000)


@given(st.floats(0.01, 50), st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(0, 50), st.data())
@settings(max_examples=60, deadline=None)
def test_the_share_of_a_sample_does_not_depend_on_its_batch(alpha, ids, epoch, data):
    shares = draw_betas(STREAM, epoch, np.array(ids), alpha)
    assert np.isfinite(shares).all()
    part = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10))
    np.testing.assert_array_equal(draw_betas(STREAM, epoch, np.array(ids)[part], alpha), shares[part])


def test_golden_shares():
    """The results of existing recipes depend on these values."""
    found = draw_betas(derive_stream(7, "incv", 1, 1), 4, np.array([0, 1, 12345]), 0.4)
    np.testing.assert_allclose(found, GOLDEN, rtol=1e-12)


GOLDEN = [0.3741753791923487, 0.05587588341874595, 9.581790680421771e-05]
