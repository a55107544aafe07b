"""`incv keys`."""

from collections.abc import Callable

from tests.support import REPOSITORY
from tests.support.command_line import Answer
from trainer.config.key_reference import MAIN_KEYS

Incv = Callable[..., Answer]


def test_keys_prints_a_section_with_its_subsections(incv: Incv) -> None:
    answer = incv("keys", "incv")
    assert answer.code == 0
    assert "rounds   integer ≥ 1; default: 4" in answer.out
    assert "incv.optimizer\n" in answer.out
    assert "coteaching" not in answer.out.replace("docs/", "")
    assert len(incv("keys", "--all").out) > len(answer.out)
    assert incv("keys", "incv", "--all").code == 2


def test_keys_alone_prints_the_main_ones_in_a_line_each(incv: Incv) -> None:
    lines = incv("keys").out.splitlines()
    keys = [line.split()[0] for line in lines if line.startswith("  ")]
    assert len(keys) == sum(len(names.split()) for names in MAIN_KEYS.values())
    assert 35 <= len(keys) <= 45
    assert "  rounds            4                Rounds of noisy cross-validation" in lines


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
