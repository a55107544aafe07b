"""Judges how far the result of a run can be trusted, without knowing the true labels: pure functions.

The thresholds of trained networks were chosen on 37 audits with known wrong labels and checked on 31 others
(benchmarks/audits.py); those of a judge by features on 240, and checked on others (benchmarks/feature_audits.py).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.report.text import choose_form

Level = Literal["trusted", "with care", "do not use"]
MEANING: dict[Level, str] = {
    "trusted": "the most suspicious labels are nearly all wrong, and the estimated share of wrong labels is close",
    "with care": "the list is useful, but look before you change a label; the estimated share is rough",
    "do not use": "the result says too little about these labels; no share of wrong labels is stated",
}
"""What each level says about the list of labels; docs/own-data.md has the same words."""
SCOPE = "This is about the top of the list, not about every row: further down, more of the labels are correct."

TRUSTED_SKILL, USABLE_SKILL = 0.65, 0.38
TRUSTED_REPEATS = 0.7
TRUSTED_LISTED = 0.75
SPREAD = 0.1
FOLD_GAP = 0.15
USABLE_BY_FEATURES = 0.42
"""Skill of a judge by features that is usable."""
UNEXPLAINED, FAR_UNEXPLAINED = 0.09, 0.2
"""By how much the estimate may exceed the random flips."""
FLIPPED = 0.85
"""Probability of the most suspicious labels to be random flips; below the half of it, nearly none are."""
NOTHING_LEARNED = 0.9
"""Part of the random labels' noise, 1 - 1/classes, from which on the predictions have learned nothing."""
FEW_AGREE = 0.18
"""Agreement of a judge by features, scaled as the skill, below which a little knowledge looks like much noise."""
FEW_STEPS = 100
FITTED = 0.9  # training accuracy above which a fold has fitted its labels, right or wrong
UNFITTED = 0.05  # a fold that fits its labels this much worse than the held-out ones was still learning
BEHIND, FAR_BEHIND = 2.0, 10.0  # points of accuracy


@dataclass(frozen=True)
class Signals:
    """What a run shows of its own quality; None if unknown."""

    samples: int
    classes: int
    chance: float
    """Share of the most frequent given label: the agreement of a network that has learned nothing."""
    agreement: float
    """Share of held-out predictions of round 1 that agree with the given label."""
    agreement_each: tuple[float, ...]
    estimate: float
    """The noise estimate that the report states."""
    other_estimate: float
    """The paper's estimate, or the confident one if the report states the paper's."""
    repeated: float | None
    """Of the contradicted labels that two rounds predicted, the share contradicted by the same class."""
    repeated_listed: float | None
    """The same among the most suspicious samples."""
    train_accuracy: float | None
    """Mean training accuracy of the folds at the end of round 1."""
    steps: int | None
    """Training steps of a fold in round 1."""
    rare_classes: tuple[str, ...] = ()
    """Classes of which few samples were selected."""
    gain: float | None = None
    """Accuracy of the method that trains on the selection minus that of standard training, in points."""
    gain_error: float = 0.0
    """Two standard errors of `gain`."""
    checked: int = 0
    """How many labels were checked by hand."""
    train_loss: float | None = None
    """Mean training loss of the folds at the end of round 1."""
    flips: float | None = None
    """Share of labels that are flipped at random, as a judge by features measures it; None for trained networks."""
    listed_flipped: float | None = None
    """The mean probability of the most suspicious labels to be random flips; None for trained networks."""

    @property
    def skill(self) -> float:
        """The accuracy on correct labels, as the agreement implies it: 0 for guessing, 1 for perfect.

        Predictions with accuracy a agree with a * (1 - ε) of the labels, for a noise ratio ε. By features it is the
        least that it can be: only random flips count as noise.
        """
        noise = self.estimate if self.flips is None else self.flips
        accuracy = min(1.0, self.agreement / max(1.0 - noise, 1e-6))
        guessing = 1.0 / self.classes
        return (accuracy - guessing) / (1.0 - guessing)

    @property
    def is_at_chance(self) -> bool:
        """Whether the agreement is no better than the most frequent label's, within two standard errors."""
        error = math.sqrt(self.chance * (1 - self.chance) / max(self.samples, 1))
        random = self.flips is not None and self.flips >= NOTHING_LEARNED * (1.0 - 1.0 / self.classes)
        return random or self.agreement <= self.chance + 2 * error


@dataclass(frozen=True)
class Reason:
    level: Level
    """The highest level of trust that this allows."""
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Trust:
    level: Level
    reasons: tuple[Reason, ...]
    skill: float
    noise_range: tuple[float, float] | None = None
    """The lowest and highest noise estimate, if they differ so much that none of them should be stated alone."""
    lift: float | None = None
    """How many times as often the most suspicious labels are wrong as all; None if it cannot be told."""

    @property
    def claims_noise(self) -> bool:
        """Whether the report may state a share of wrong labels."""
        return self.level != "do not use"

    def as_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "skill": self.skill,
            "claims_noise": self.claims_noise,
            "noise_range": self.noise_range,
            "lift": self.lift,
            "reasons": [asdict(reason) for reason in self.reasons],
        }


def explain_level(level: Level) -> str:
    """Return in a sentence or two what a level means for the user."""
    meaning = f"{MEANING[level][0].upper()}{MEANING[level][1:]}."
    return meaning if level == "do not use" else f"{meaning} {SCOPE}"


def judge(signals: Signals) -> Trust:
    """Return the level of trust, the lowest that any reason allows, with the reasons for it."""
    found = [*_learning(signals), *_consistency(signals), *_selection(signals)]
    order: tuple[Level, ...] = ("do not use", "with care", "trusted")
    level: Level = min((reason.level for reason in found), key=order.index, default="trusted")
    if level == "trusted":
        found.append(Reason("trusted", _praise(signals)))
    found.sort(key=lambda reason: order.index(reason.level))
    return Trust(level, tuple(found), signals.skill, _noise_range(signals), _lift(signals))


def _learning(signals: Signals) -> list[Reason]:
    """Whether the networks have learned enough to judge labels."""
    agreement, skill = _percent(signals.agreement), _percent(max(signals.skill, 0.0))
    if signals.is_at_chance:
        text = (
            f"The held-out predictions agree with {agreement} of the labels, no better than always predicting the "
            f"most frequent class ({_percent(signals.chance)}): nothing that helps has been learned."
        )
        return [Reason("do not use", text, _learn_more(signals))]
    usable = USABLE_SKILL if signals.flips is None else USABLE_BY_FEATURES
    if signals.skill < usable:
        text = (
            f"The predictions know too little to judge labels: they agree with {agreement} of the held-out labels, "
            f"which means a skill of {skill} (0 % is guessing, below {_percent(usable)} is unusable)."
        )
        return [Reason("do not use", text, _learn_more(signals))]
    if signals.skill < TRUSTED_SKILL:
        text = (
            f"The predictions recognise the classes only in part: their skill is {skill} (0 % is guessing, from "
            f"{_percent(TRUSTED_SKILL)} on results were reliable). Some suspicious labels are only difficult images."
        )
        return [Reason("with care", text, _learn_more(signals))]
    return []


def _learn_more(signals: Signals) -> str:
    """What would give networks that know more, judged by how well they fitted their training labels."""
    if signals.flips is not None:
        return (
            "Use a better network (--model, --weights) or larger images (image.size), check that the images show "
            "what tells the classes apart, or add images."
        )
    if signals.train_accuracy is not None and signals.train_accuracy >= FITTED:
        return (
            f"The folds fit {_percent(signals.train_accuracy)} of their own labels, so more epochs will not help: "
            "start from pretrained weights, or better ones (model.pretrained or model.weights), or add images."
        )
    steps = f" ({signals.steps:,} steps per fold)" if signals.steps is not None else ""
    if unlearned := _describe_unlearned(signals):
        return (
            f"The folds seem not to have converged{steps}: {unlearned}. Train longer (raise incv.epochs), or lower "
            "incv.optimizer.learning_rate."
        )
    longer = f"Train longer{steps}: raise incv.epochs. " if signals.steps is None or signals.steps < FEW_STEPS else ""
    return longer + (
        "Start from pretrained weights, or better ones (model.pretrained or model.weights), check that image.size "
        "shows what tells the classes apart, or add images."
    )


def _describe_unlearned(signals: Signals) -> str:
    """Say what shows that the folds have not learned even their own labels; empty if nothing does."""
    guessing = math.log(signals.classes)
    if signals.train_loss is not None and signals.train_loss > guessing:
        return f"their training loss ended at {signals.train_loss:.1f}, above the {guessing:.1f} of guessing"
    if signals.train_accuracy is not None and signals.train_accuracy < signals.agreement - UNFITTED:
        return f"they fit only {_percent(signals.train_accuracy)} of their own labels, less than of the held-out ones"
    return ""


def _consistency(signals: Signals) -> list[Reason]:
    """Whether different predictions, or measures of the noise, come to the same conclusions."""
    reasons = [] if signals.flips is None else _explained_by_flips(signals, signals.flips)
    if signals.repeated is not None and signals.repeated < TRUSTED_REPEATS:
        text = (
            f"Only {_percent(signals.repeated)} of the contradicted labels were contradicted by the same class in "
            f"two rounds (at least {_percent(TRUSTED_REPEATS)} in reliable runs)."
        )
        reasons.append(Reason("with care", text, "Look at both labels before you change one."))
    if signals.repeated_listed is not None and signals.repeated_listed < TRUSTED_LISTED:
        text = (
            f"Even among the most suspicious samples, only {_percent(signals.repeated_listed)} got the same "
            "suggestion twice."
        )
        reasons.append(Reason("with care", text, "Do not apply suggested labels without looking."))
    estimates = _noise_range(signals)
    if signals.flips is None and estimates is not None and not signals.is_at_chance:
        low, high = estimates
        text = (
            f"The noise estimates differ by {(high - low) * 100:.0f} points ({_percent(signals.estimate)} and "
            f"{_percent(signals.other_estimate)})."
        )
        reasons.append(Reason("with care", text, "Read the share of wrong labels as a rough range."))
    gap = max(signals.agreement_each, default=0.0) - min(signals.agreement_each, default=0.0)
    if gap > max(FOLD_GAP, _range_by_chance(signals)):
        text = f"The folds agree with the labels to different degrees: they differ by {gap * 100:.0f} points."
        reasons.append(Reason("with care", text, "Run again with another seed, or train longer (incv.epochs)."))
    return reasons


def _explained_by_flips(signals: Signals, flips: float) -> list[Reason]:
    """Whether the contradicted labels are random flips, which nothing but an error explains.

    Others may be confusions of people, or of the features: no held-out prediction tells these apart.
    """
    reasons, more = [], signals.estimate - flips
    advice = (
        "Look at the pairs of classes that are contradicted most often, and at both labels before you change one."
    )
    listed = 1.0 if signals.listed_flipped is None else signals.listed_flipped
    if more >= FAR_UNEXPLAINED and listed < FLIPPED / 2:
        text = (
            f"{_percent(more)} of the labels are contradicted between classes that the features confuse (below "
            f"{_percent(FAR_UNEXPLAINED)} in usable results): most of them may be difficult images."
        )
        reasons.append(Reason("do not use", text, _learn_more(signals)))
    elif more > UNEXPLAINED:
        text = (
            f"{_percent(flips)} of the labels are flipped at random; another {_percent(more)} are contradicted "
            "between classes that the features confuse, by wrong labels or by difficult images."
        )
        reasons.append(Reason("with care", text, advice))
    guessing = 1.0 / signals.classes
    if (signals.agreement - guessing) / (1.0 - guessing) < FEW_AGREE:
        text = (
            f"Only {_percent(signals.agreement)} of the labels agree with the predictions: that they are flipped, or "
            "that the features say little, cannot be told apart."
        )
        reasons.append(Reason("with care", text, _learn_more(signals)))
    if listed < FLIPPED:
        text = (
            f"Of the most suspicious labels, {_percent(listed)} are wrong beyond doubt. The others "
            "may be difficult images, or there are few wrong labels."
        )
        reasons.append(Reason("with care", text, advice))
    return reasons


def _lift(signals: Signals) -> float | None:
    """Return how many times as often the most suspicious labels are wrong as all of them, where that can be told."""
    if signals.listed_flipped is None or signals.listed_flipped < FLIPPED or not signals.estimate:
        return None
    return signals.listed_flipped / signals.estimate


def _range_by_chance(signals: Signals) -> float:
    """Return how far the agreements of equally good networks may lie apart, since each judges few samples.

    It is the asymptotic range of normal variables, 2 sqrt(2 ln K) standard errors of K folds, and a bound for few.
    """
    folds = len(signals.agreement_each)
    if folds < 2:
        return 0.0
    error = math.sqrt(signals.agreement * (1 - signals.agreement) * folds / max(signals.samples, 1))
    return 2 * math.sqrt(2 * math.log(folds)) * error


def _noise_range(signals: Signals) -> tuple[float, float] | None:
    """Return the lowest and highest noise estimate; None if they are close."""
    if signals.flips is not None:
        wide = signals.estimate - signals.flips > UNEXPLAINED
        return (signals.flips, signals.estimate) if wide else None
    low, high = sorted((signals.estimate, signals.other_estimate))
    return (low, high) if high - low > SPREAD else None


def _selection(signals: Signals) -> list[Reason]:
    """Whether what is left in doubt can be judged, and the selected samples are a usable training set."""
    reasons = []
    if signals.checked:
        text = (
            f"{_count(signals.checked, 'label was', 'labels were')} checked by hand, mostly those with easy errors: "
            "what is still doubted may be less certain than in the first run."
        )
        reasons.append(Reason("with care", text, "Look at the remaining images before you change a label."))
    if signals.rare_classes:
        shown = ", ".join(signals.rare_classes[:5]) + (", …" if len(signals.rare_classes) > 5 else "")
        text = f"Few samples were selected in {_count(len(signals.rare_classes), 'class', 'classes')}: {shown}."
        advice = "Look at these classes in labels_review.csv, or set incv.min_per_class."
        reasons.append(Reason("with care", text, advice))
    if signals.gain is not None and signals.gain < -max(BEHIND, signals.gain_error):
        text = (
            f"Training on the selection gives {-signals.gain:.1f} points less accuracy on the evaluation set than "
            "standard training on all labels."
        )
        advice = "Keep the original set for training, and use the list only to look at labels."
        reasons.append(Reason("do not use" if signals.gain < -FAR_BEHIND else "with care", text, advice))
    return reasons


def _praise(signals: Signals) -> str:
    if (lift := _lift(signals)) is not None and signals.listed_flipped is not None:
        return (
            f"Of the most suspicious labels, {_percent(signals.listed_flipped)} are wrong beyond doubt, {lift:.1f} "
            f"times the share of all labels. The skill is {_percent(signals.skill)} (0 % is guessing)."
        )
    text = f"The networks' skill is {_percent(signals.skill)} (0 % is guessing)"
    if signals.repeated is not None:
        text += (
            f", and {_percent(signals.repeated)} of the contradicted labels were contradicted by the same class twice"
        )
    return text + "."


def _percent(value: float) -> str:
    """Format a fraction; rounded down, so that a value below a threshold never reads as the threshold."""
    return f"{math.floor(value * 100 + 1e-9)} %"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {choose_form(number, one, many)}"
