"""Several graphs per step with all-reduces between them match DDP and one process. `make test-gpu` runs these."""

import pytest
import torch

from tests.support.fast_steps import KINDS
from tests.support.graph_ranks import assert_same_values, furthest, ids_of, told_by

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (told,) = told_by(1, tmp_path_factory.mktemp("alone"), KINDS)
    return told


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return told_by(2, tmp_path_factory.mktemp("ranks"), KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_two_ranks_do_what_ddp_does(kind, ranks):
    for told in ranks:
        replayed, ddp = told[f"{kind} graphs"], told[f"{kind} eager"]
        assert replayed["chosen"] == ddp["chosen"]
        assert replayed["guard"] == ddp["guard"] == {"skipped": 1, "in_a_row": 0}
        assert furthest(replayed["first"], ddp["first"]) == 0.0
        assert furthest(ddp["last"], ddp["first"]) > 0.01  # it did learn
        assert furthest(replayed["last"], ddp["last"]) < 1e-5
        assert_same_values(replayed, ddp, rel=1e-5)


@pytest.mark.parametrize("way", ["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_hold_the_same_weights(kind, way, ranks):
    one, other = (told[f"{kind} {way}"] for told in ranks)
    assert furthest(one["last"], other["last"]) == 0.0
    assert_same_values(one, other, rel=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_graphs_do_what_one_process_does(kind, alone, ranks):
    """One process with the same global batch, eagerly; its graphs are one a step."""
    single, stories = alone[f"{kind} eager"], [told[f"{kind} graphs"] for told in ranks]
    assert ids_of(stories) == ids_of([single])
    assert furthest(stories[0]["last"], single["last"]) < 1e-4
    assert_same_values(stories[0], single, rel=1e-4)
    if kind != "standard":
        assert all(story["chosen"][0][0] for story in stories)  # both ranks had rows to learn from
        assert len({values["kept"] for values in single["values"]}) > 3  # n(e) did change


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_one_process_do_the_same(kind, alone):
    assert alone[f"{kind} graphs"]["chosen"] == alone[f"{kind} eager"]["chosen"]
    assert furthest(alone[f"{kind} graphs"]["last"], alone[f"{kind} eager"]["last"]) < 1e-5
