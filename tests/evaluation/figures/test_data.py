import numpy as np
import pytest
from matplotlib.cbook import boxplot_stats

from collegium.evaluation.figures.data import (
    Axis,
    Boxes,
    Figure,
    Heat,
    Look,
    Panel,
    Series,
    box_of,
)

LOOK = Look(0, 0)
SAMPLES = [
    *([*np.random.default_rng(k).normal(size=3 + 5 * k)] for k in range(8)),
    [0.5],
    [1.0, 1.0, 1.0],
    [0.0, 0.0, 0.0, 0.0, 9.0],  # the box is a point, and one score beyond
    [1.0, 2.0, 3.0, 4.0, 100.0],
    [-50.0, 1.0, 1.1, 1.2, 1.3],
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_box_is_that_of_matplotlib(sample):
    (expected,) = boxplot_stats(sample)
    found = box_of(2.0, tuple(sample))
    numbers = found.low, found.first, found.median, found.third, found.high
    names = "whislo", "q1", "med", "q3", "whishi"
    assert numbers == pytest.approx([expected[name] for name in names])
    assert found.beyond == pytest.approx(sorted(expected["fliers"]))
    assert (found.place, found.count) == (2.0, len(sample))


def test_a_description_holds_the_numbers_that_tell_most():
    points = Series("FedAvg", LOOK, "points", (0.1, 1.0), (0.5, 0.625))
    line = Series("Local", LOOK, "line", (1.0, 2.0, 3.0), (0.1, 0.2, 0.375))
    cloud = Series("Ditto", LOOK, "scatter", (0.0,) * 7, (1.0,) * 7)
    dice, rounds = Axis("Dice"), Axis("round")
    heat = Heat(("a", "b"), (1.0,), ((0.25,), (float("nan"),)), "rate", (0.0, 1.0))
    boxes = Boxes("IOP-FL", LOOK, (box_of(0.2, (1.0, 2.0, 4.0)),))
    figure = Figure(
        "x", "Title", "Caption.",
        (
            Panel("one", rounds, dice, (points, line)),
            Panel("", Axis("alone", "mm"), dice, (cloud,)),
            Panel("", rounds, Axis(""), heat=heat),
            Panel("", dice, Axis("setting", names=("all", "none")), boxes=(boxes,)),
        ),
    )  # fmt: skip
    assert figure.description == (
        "Title. one: Dice over round: FedAvg 0.5 at 0.1, 0.625 at 1; Local 0.375 at 3. "
        "Dice over alone (mm): Ditto, 7 points. "
        "rate of 2 rows, from 0.25 to 0.25. "
        "Dice by setting: IOP-FL all median 2."
    )


def test_of_many_methods_a_description_names_some():
    lines = tuple(Series(f"m{k}", LOOK, "line", (1.0,), (0.5,)) for k in range(15))
    figure = Figure("x", "Title", "", (Panel("", Axis("round"), Axis("Dice"), lines),))
    assert figure.description.endswith("m11 0.5 at 1; and 3 more.")
