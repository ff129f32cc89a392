"""The sentences of verdicts, letter by letter."""

import pytest

from collegium.evaluation.verdicts import Verdict

MINUS = "\u2212"


def say(outcome, **values):
    """The sentence of a verdict with five trainings of each unless said otherwise."""
    about = {"site": "north", "metric": "dice", "method": "Ditto personal", "patients": 12}
    trained = {"trainings_joined": 5, "trainings_reference": 5}
    return Verdict(**{**about, **trained, **values}, outcome=outcome).sentence


ONE = {"trainings_joined": 1, "trainings_reference": 1}
GAIN = {"difference": 0.0301, "low": 0.0102, "high": 0.0504}
LOSS = {"difference": -0.0301, "low": -0.0504, "high": -0.0102}
AGAIN = "Expect it of another training and another patient like these."
LUCK = "Trained again it may come out otherwise: the statement stands while"


def test_better_is_said_of_joining_with_three_trainings():
    assert say("better", **GAIN) == (
        "Joining helps here: Ditto personal scores 0.030 Dice more than training alone (95 % "
        f"interval +0.010 to +0.050, 12 patients, 5 trainings of each). {AGAIN}"
    )


def test_worse_is_said_of_joining_with_three_trainings():
    assert say("worse", **LOSS) == (
        "Joining hurts here: Ditto personal scores 0.030 Dice less than training alone (95 % "
        f"interval {MINUS}0.050 to {MINUS}0.010, 12 patients, 5 trainings of each). {AGAIN}"
    )


def test_better_is_said_of_this_model_with_fewer():
    assert say("better", **GAIN, **ONE, tipping_sd=0.0081) == (
        "This model is better than the one trained alone, on patients like these (+0.030, +0.010 "
        f"to +0.050, 12 patients). {LUCK} two trainings of one method differ here by an sd below "
        "0.008. Three trainings answer whether joining helps."
    )
    assert say("worse", **LOSS, **ONE, tipping_sd=0.00004).startswith(
        f"This model is worse than the one trained alone, on patients like these ({MINUS}0.030, "
    )
    assert "an sd below 4e-05. " in say("worse", **LOSS, **ONE, tipping_sd=0.00004)


@pytest.mark.parametrize(
    ("values", "three", "one"),
    [
        ({"relevant": 0.01}, "helps here relevantly: ", "This model is relevantly better than "),
        (
            {"relevant": 0.04},
            "helps here, perhaps too little to matter: ",
            "12 patients), perhaps too little to matter. Trained again",
        ),
        ({"relevant": 0.02}, "helps here: ", "12 patients). Trained again"),
    ],
)
def test_relevant_gains_and_small_ones_are_called_so(values, three, one):
    assert three in say("better", **GAIN, **values)
    assert one in say("better", **GAIN, **values, **ONE, tipping_sd=0.01)


def test_distances_fall_and_have_their_unit():
    about = {"metric": "hd95", "unit": "mm", "higher_is_better": False}
    assert say("better", **about, difference=-2.343, low=-3.615, high=-1.07).startswith(
        "Joining helps here: Ditto personal scores 2.34 mm HD95 less than training alone (95 % "
        f"interval {MINUS}3.62 to {MINUS}1.07, "
    )


def test_unequal_trainings_are_both_counted():
    text = say("better", **GAIN, trainings_reference=3)
    assert "12 patients, 5 trainings against 3). " in text


def test_equivalent_names_the_smallest_relevant_difference():
    inside = {"difference": 0.001, "low": -0.004, "high": 0.006, "relevant": 0.01}
    ends = f"({MINUS}0.004 to +0.006)."
    assert say("equivalent", **inside) == (
        f"No relevant difference: whatever joining changes here is smaller than 0.01 {ends}"
    )
    assert say("equivalent", **inside, **ONE) == (
        f"These two models differ by less than 0.01 {ends}"
    )


UNSURE = {"difference": 0.01, "low": -0.0123, "high": 0.0343, "smallest_detectable": 0.0311}


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ({"patients_needed": 62}, "The difference seen would need about 62 patients."),
        (
            {"trainings_needed": 9, "trainings_differ": True},
            "No number of patients settles it: the trainings differ. About 9 trainings would.",
        ),
        (
            {"trainings_differ": True},
            "Neither 1000 patients nor 50 trainings would find the difference seen.",
        ),
        ({}, "The difference seen would need more than 1000 patients."),
    ],
)
def test_cannot_tell_says_what_would_be_found_and_what_it_would_take(values, end):
    interval = f"the interval ({MINUS}0.012 to +0.034) holds gain and loss. 12 patients"
    assert say("cannot tell", **UNSURE, **values) == (
        f"Cannot tell: {interval} and 5 trainings find differences from about 0.031. {end}"
    )
    assert say("cannot tell", **UNSURE, **values, **ONE) == (
        f"Cannot tell about these two models: {interval} find differences from about 0.031. {end}"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"reason": "few patients", "patients": 5}, "5 test patients; at least 6 are needed."),
        ({"reason": "few patients", "patients": 1}, "1 test patient; at least 6 are needed."),
        (
            {"reason": "few events", "fewest": 2, "fewest_of": "with no disease"},
            "2 test patients with no disease; at least 6 are needed.",
        ),
        ({"reason": "no pair", "patients": 0}, "no patient has a score with both."),
        (
            {"reason": "no pair", "patients": 0, "undefined": 3},
            "no patient has a score with both: Dice is undefined for one of them or both in all 3 "
            "test cases.",
        ),
        (
            {"reason": "no pair", "patients": 0, "undefined": 1},
            "no patient has a score with both: Dice is undefined for one of them or both in the "
            "one test case.",
        ),
        (
            {"reason": "same difference", "difference": 0.1},
            "every patient shows the same difference (+0.100).",
        ),
    ],
)
def test_too_few_patients_are_counted(values, text):
    assert say("cannot tell", **values) == f"Cannot tell: {text}"
    assert say("cannot tell", **values, **ONE) == f"Cannot tell: {text}"


def test_the_same_model_is_called_so_only_if_its_bits_are_equal():
    assert say("identical", same_model=True) == (
        "Ditto personal and training alone are the same model."
    )
    assert say("identical") == "Ditto personal and training alone score the same for every patient."


def test_a_few_patients_that_make_the_mean_are_named():
    remark = " A few patients make the mean: for most the difference has the other sign."
    assert say("better", **GAIN, few_decide=True) == say("better", **GAIN) + remark
    assert say("cannot tell", **UNSURE, few_decide=True).endswith(remark)
    inside = {"difference": 0.001, "low": -0.004, "high": 0.006, "relevant": 0.01}
    assert say("equivalent", **inside, few_decide=True) == say("equivalent", **inside)


def test_what_validation_says_of_training_alone_stands_beside():
    assert say("better", **GAIN, alone_chosen=True).endswith(
        f"{AGAIN} On validation training alone was better than any method."
    )


def test_of_adapting_the_reference_is_the_unadapted_model():
    about = {"question": "adapting", "method": "FedAvg + Tent"}
    assert say("better", **GAIN, **about).startswith(
        "Adapting helps here: FedAvg + Tent scores 0.030 Dice more than the unadapted model (95 %"
    )
    assert say("better", **GAIN, **about, **ONE, tipping_sd=0.02).endswith(
        f"{LUCK} the differences of two trainings vary here by an sd below 0.020. Three trainings "
        "answer whether adapting helps."
    )
    assert say("worse", **LOSS, **about, **ONE).startswith(
        "This model is worse than the unadapted one, on patients like these"
    )
