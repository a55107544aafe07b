"""Words of an audit instead of recipe keys: whole words, the longest, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer.auditing.wording import audit_words, in_words_of_audit, replace_words

from shards.errors import ConfigError, DataError
from trainer.run.source_check import SourceChanged

TEXTS = st.text(alphabet="ab.-_ =", max_size=30)


@given(TEXTS, st.dictionaries(st.sampled_from(["a", "a.b", "--a", "a.b ="]), st.just("X"), min_size=1))
def test_replacing_leaves_no_word_and_changes_nothing_else(text: str, words: dict[str, str]) -> None:
    replaced = replace_words(text, words)
    assert replace_words(replaced, words) == replaced
    if not any(word in text for word in words):
        assert replaced == text


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("set data.train.root", "set photos"),
        ("set data.train.root_x", "set data.train.root_x"),
        ("--rooted --root", "--rooted photos"),
        ("with data.train.label_column or --label-column", "with --label-column or --label-column"),
        ("do not fit model.name = resnet18: set model.name", "do not fit --model resnet18: set --model"),
        ("model.weights w.pth", "--weights w.pth"),
    ],
)
def test_words(text: str, replaced: str) -> None:
    assert replace_words(text, audit_words(Path("photos"), chooses_network=True)) == replaced


def test_errors_keep_their_type() -> None:
    words = audit_words(Path("photos"), chooses_network=False)
    for kind in (ConfigError, DataError):
        with pytest.raises(kind, match="no photos"), in_words_of_audit(words):
            raise kind("no --root")
    unchanged = DataError("model.name")
    with pytest.raises(DataError) as raised, in_words_of_audit(words):
        raise unchanged
    assert raised.value is unchanged
    root = Path("photos").resolve()
    with pytest.raises(ConfigError, match=r"^photos has changed: x\. Add `--redo pack`"), in_words_of_audit(words):
        raise SourceChanged(f"data.train.root = {root} has changed: x", "data.train.root=null")
