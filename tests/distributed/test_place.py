import pytest

from trainer.distributed.place import show_place


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("incv/0/1", "incv, round 1, fold 2"),
        ("incv/3/0 predict", "incv, round 4, fold 1, predict"),
        ("waiting after incv/0/0 predict", "waiting after incv, round 1, fold 1, predict"),
        ("standard", "standard"),
        ("evaluate standard on test", "evaluate standard on test"),
        ("waiting for the other fold", "waiting for the other fold"),
    ],
)
def test_places_are_told_in_words(where: str, words: str) -> None:
    assert show_place(where) == words
