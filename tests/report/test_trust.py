"""The level of trust: its reasons, and its calibration on recorded audits with known wrong labels."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import REPOSITORY
from trainer.report.trust import MEANING, SCOPE, UNFITTED, Signals, explain_level, judge

GOOD = Signals(
    samples=320,
    classes=4,
    chance=0.27,
    agreement=0.72,
    agreement_each=(0.71, 0.73),
    estimate=0.2,
    other_estimate=0.16,
    repeated=0.85,
    repeated_listed=0.95,
    train_accuracy=0.8,
    steps=150,
)
ORDER = ("do not use", "with care", "trusted")
_ratio = st.floats(0, 1)


BY_FEATURES = Signals(
    samples=3000,
    classes=10,
    chance=0.11,
    agreement=0.78,
    agreement_each=(0.77, 0.79),
    estimate=0.11,
    other_estimate=0.2,
    repeated=None,
    repeated_listed=None,
    train_accuracy=None,
    steps=None,
    flips=0.03,
    listed_flipped=0.97,
)


def recorded(which: str | None = None, family: str = "audits") -> list[dict]:
    """The recorded audits of a set; None: of all. family: `audits` or `feature_audits`."""
    lines = (REPOSITORY / f"benchmarks/results/{family}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if which in (line["set"], None)]


def read_signals(line: dict) -> Signals:
    listed = ("agreement_each", "rare_classes")
    return Signals(**{key: tuple(value) if key in listed else value for key, value in line["signals"].items()})


CHECKED = [*recorded("check"), *recorded("check", "feature_audits")]


@pytest.mark.parametrize("line", CHECKED, ids=lambda line: line["case"])
def test_the_level_fits_the_measured_quality(line):
    """None of these audits was used to choose the thresholds."""
    level = judge(read_signals(line)).level
    if line["precision"] < 0.7 or line["error"] > 0.1:
        assert level != "trusted"
    if line["precision"] >= 0.9 and line["error"] <= 0.05:
        assert level != "do not use"


def test_all_levels_occur_in_the_check():
    levels = [judge(read_signals(line)).level for line in recorded("check")]
    assert len(levels) >= 20
    assert {level: levels.count(level) >= 5 for level in ORDER} == dict.fromkeys(ORDER, True)


def test_lists_that_are_no_better_than_chance_are_not_to_be_used():
    """By features, where the first 24 are wrong less than twice as often as all, and 24 are wrong at least."""
    audits = [line for line in recorded(None, "feature_audits") if line["wrong"] * line["signals"]["samples"] >= 24]
    poor = [line for line in audits if line["listed"] < min(2 * line["wrong"], 0.9)]
    levels = [judge(read_signals(line)).level for line in poor]
    assert len(levels) >= 20
    assert "trusted" not in levels
    assert levels.count("with care") <= len(levels) // 5


def test_a_good_run_is_trusted():
    trust = judge(GOOD)
    assert trust.level == "trusted"
    assert trust.claims_noise
    assert "85 %" in trust.reasons[0].text


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"agreement": 0.3}, "do not use", "no better than always predicting the most frequent class (27 %)"),
        ({"agreement": 0.42}, "do not use", "know too little"),
        ({"agreement": 0.55}, "with care", "only in part"),
        ({"repeated": 0.6}, "with care", "60 % of the contradicted labels"),
        ({"repeated_listed": 0.5}, "with care", "50 % got the same suggestion"),
        ({"other_estimate": 0.45}, "with care", "differ by 25 points"),
        ({"agreement_each": (0.6, 0.84)}, "with care", "differ by 24 points"),
        ({"agreement_each": (0.58, *[0.75] * 9), "samples": 500}, "trusted", "skill"),  # of 50 samples each: chance
        ({"agreement_each": (0.58, *[0.75] * 9), "samples": 50_000}, "with care", "differ by 17 points"),
        ({"rare_classes": ("disc",)}, "with care", "1 class: disc"),
        ({"checked": 3}, "with care", "3 labels were checked by hand"),
        ({"gain": -5.0, "gain_error": 3.0}, "with care", "5.0 points less accuracy"),
        ({"gain": -22.0, "gain_error": 3.0}, "do not use", "22.0 points less accuracy"),
        ({"gain": -5.0, "gain_error": 6.0}, "trusted", "skill"),  # within the error
        ({"gain": 3.0}, "trusted", "skill"),
    ],
)
def test_reasons(change, level, words):
    trust = judge(replace(GOOD, **change))
    assert trust.level == level
    assert words in trust.reasons[0].text


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, "trusted", "97 % are wrong beyond doubt, 8.8 times the share of all labels"),
        ({"estimate": 0.03, "other_estimate": 0.3}, "trusted", "32.3 times"),
        ({"agreement": 0.11}, "do not use", "no better than always predicting"),
        ({"agreement": 0.3, "flips": 0.88}, "do not use", "nothing that helps has been learned"),
        ({"agreement": 0.2, "flips": 0.75, "estimate": 0.75}, "with care", "Only 20 % of the labels agree"),
        ({"agreement": 0.4}, "do not use", "know too little"),
        ({"agreement": 0.6}, "with care", "only in part"),
        ({"estimate": 0.16}, "with care", "another 13 % are contradicted between classes"),
        ({"estimate": 0.26, "listed_flipped": 0.1}, "do not use", "most of them may be difficult images"),
        ({"listed_flipped": 0.3}, "with care", "30 % are wrong beyond doubt"),
        ({"checked": 3}, "with care", "3 labels were checked by hand"),
    ],
)
def test_reasons_by_features(change, level, words):
    trust = judge(replace(BY_FEATURES, **change))
    assert trust.level == level
    assert any(words in reason.text for reason in trust.reasons)
    assert (trust.lift is None) == (change.get("listed_flipped", 1) < 0.85)


def test_by_features_the_range_starts_at_the_random_flips():
    assert judge(BY_FEATURES).noise_range is None
    assert judge(replace(BY_FEATURES, estimate=0.18)).noise_range == (0.03, 0.18)


def test_estimates_that_are_far_apart_are_a_range():
    assert judge(GOOD).noise_range is None
    apart = replace(GOOD, estimate=0.2, other_estimate=0.08)
    assert judge(apart).noise_range == judge(replace(apart, estimate=0.08, other_estimate=0.2)).noise_range
    assert judge(apart).as_json()["noise_range"] == (0.08, 0.2)


def test_the_true_share_lies_within_most_ranges_of_recorded_audits():
    """The numbers of docs/own-data.md."""
    audits = [line for line in recorded() if line["level"] == "with care"]
    ranges = [(judge(read_signals(line)).noise_range, line["wrong"]) for line in audits]
    outside = [max(found[0] - wrong, wrong - found[1], 0.0) for found, wrong in ranges if found is not None]
    assert (len(outside), outside.count(0.0)) == (10, 7)
    assert max(outside) < 0.11


def test_advice_depends_on_how_well_the_folds_fit():
    weak = replace(GOOD, agreement=0.42)
    assert "raise incv.epochs" in judge(replace(weak, steps=30, train_accuracy=0.4)).reasons[0].advice
    fitted = judge(replace(weak, steps=900, train_accuracy=0.99)).reasons[0].advice
    assert "more epochs will not help" in fitted
    assert "model.weights" in fitted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_loss": 4.1}, "(900 steps per fold): their training loss ended at 4.1, above the 1.4 of guessing"),
        ({"train_accuracy": 0.3}, "they fit only 30 % of their own labels"),
        ({"train_accuracy": 0.41, "train_loss": 1.2}, ""),
    ],
)
def test_folds_that_have_not_converged_are_to_blame_before_their_weights(change, words):
    advice = judge(replace(GOOD, agreement=0.42, steps=900, **change)).reasons[0].advice
    assert words in advice
    assert ("learning_rate" in advice) == bool(words)
    assert ("model.weights" in advice) != bool(words)


def test_only_recorded_audits_that_were_cut_short_have_not_converged():
    audits = [(line["case"], read_signals(line)) for line in recorded()]
    unlearned = [case for case, found in audits if found.train_accuracy < found.agreement - UNFITTED]
    assert len(unlearned) == 21
    assert all("steps0." in case for case in unlearned)


def test_every_level_is_explained_as_in_the_documentation():
    text = " ".join((REPOSITORY / "docs/own-data.md").read_text().split())
    assert set(MEANING) == set(ORDER)
    for level, meaning in MEANING.items():
        assert f"| `{level}` | {meaning} |" in text
        assert (SCOPE in explain_level(level)) == (level != "do not use")


@given(
    _ratio, _ratio, _ratio, _ratio, st.one_of(st.none(), _ratio), st.one_of(st.none(), _ratio), st.integers(2, 1000)
)
def test_chance_level_claims_nothing(agreement, chance, estimate, other, repeated, listed, classes):
    signals = replace(
        GOOD,
        classes=classes,
        chance=chance,
        agreement=agreement,
        agreement_each=(agreement,),
        estimate=estimate,
        other_estimate=other,
        repeated=repeated,
        repeated_listed=listed,
    )
    trust = judge(signals)
    assert trust.claims_noise == (trust.level != "do not use")
    assert trust.reasons
    assert min(ORDER.index(reason.level) for reason in trust.reasons) == ORDER.index(trust.level)
    if agreement <= chance:
        assert not trust.claims_noise


@given(st.floats(0.3, 0.8), st.floats(0, 0.2), st.floats(0, 0.3))
def test_more_agreement_never_lowers_trust(agreement, more, estimate):
    one = replace(GOOD, agreement=agreement, estimate=estimate, other_estimate=estimate)
    levels = [judge(replace(one, agreement=value)).level for value in (agreement, agreement + more)]
    assert ORDER.index(levels[0]) <= ORDER.index(levels[1])
