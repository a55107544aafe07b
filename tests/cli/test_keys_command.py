"""`incv keys`."""

from collections.abc import Callable

from tests.support import REPOSITORY
from tests.support.command_line import Answer

Incv = Callable[..., Answer]


def test_keys_prints_a_section_with_its_subsections(incv: Incv) -> None:
    answer = incv("keys", "incv")
    assert answer.code == 0
    assert "rounds   integer ≥ 1; default: 4" in answer.out
    assert "incv.optimizer\n" in answer.out
    assert "coteaching" not in answer.out.replace("docs/", "")
    assert len(incv("keys").out) > len(answer.out)


def test_keys_prints_one_key(incv: Incv) -> None:
    answer = incv("keys", "incv.rounds")
    assert answer.code == 0
    assert "rounds   integer ≥ 1; default: 4" in answer.out
    assert "agree_top_k" not in answer.out


def test_keys_prints_the_page_of_the_documentation(incv: Incv) -> None:
    assert incv("keys", "--markdown").out == (REPOSITORY / "docs" / "recipe.md").read_text()
    refused = incv("keys", "incv", "--markdown")
    assert (refused.code, refused.out) == (2, "")


def test_an_unknown_section_names_near_ones(incv: Incv) -> None:
    answer = incv("keys", "data.train.rot")
    assert (answer.code, answer.out) == (2, "")
    assert "did you mean data.train.root" in answer.err
    assert "sections: batch, " in answer.err
