"""The table of probabilities, whose columns are named by the classes."""

import numpy as np

from trainer.incv.probability_table import build_probability_table, class_columns


def test_a_class_called_key_has_a_column_of_its_own():
    assert class_columns(["cat", "dog"]) == ["cat", "dog"]
    assert class_columns(["_key", "key", "dog"]) == ["_key", "__key", "dog"]
    table = build_probability_table(["a", "b"], np.array([[0.1, 0.9], [0.6, 0.4]]), ["key", "dog"])
    assert table.to_pydict() == {"key": ["a", "b"], "_key": [0.1, 0.6], "dog": [0.9, 0.4]}
