from collegium.evaluation.wording import (
    interval_text,
    name_in_sentence,
    number,
    p_value,
    title,
)


def test_numbers_have_sensible_digits_and_a_typographic_minus():
    assert number(0.8124) == "0.812"
    assert number(-0.0124, signed=True) == "\u22120.012"
    assert number(12.345, "mm") == "12.35"
    assert number(-0.0001) == "0.000"
    assert number(0.0001, signed=True) == "+0.000"
    assert number(0.0, signed=True) == "0.000"
    assert number(None) == number(float("nan")) == "\u2013"
    assert interval_text(-0.012, 0.034) == "[\u22120.012, +0.034]"
    assert interval_text(float("nan"), float("nan")) == "\u2013"


def test_p_values_have_three_decimals_or_a_bound():
    assert [p_value(p) for p in (0.0414, 0.00099, float("nan"))] == ["0.041", "< 0.001", "\u2013"]


def test_metrics_are_headed_as_the_field_writes_them():
    assert [title(m) for m in ("dice", "hd95_vessel", "negative_loss", "label_iou", "assd_px")] == [
        "Dice", "HD95 vessel", "Negative loss", "Label IoU", "ASSD",
    ]  # fmt: skip


def test_within_a_sentence_only_names_and_abbreviations_are_capitals():
    names = ("dice_vessel", "hd95", "auc", "log_loss", "brier", "surface_dice")
    assert [name_in_sentence(m) for m in names] == [
        "Dice vessel", "HD95", "AUC", "log loss", "Brier", "surface Dice",
    ]  # fmt: skip
