"""How often verdicts are wrong where nothing differs, and what they find where something does.

Draws of two equally good arms, or of one method against itself trained again, are judged by the
code that judges results: a yes or a no is an error of type I. Patients' differences are normal,
heteroscedastic, of Student's t with three degrees of freedom, or exponential; trainings shift a
whole site. Methods may be chosen on validation among several. Areas under the curve are binormal.
Printed is the share of each grid of cells, mean and largest; the last lines hold means and largest
against what the specification accepts, and the power by that of a paired t-test.

    python benchmarks/verdict.py [--quick] [--cells]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import sqrt

import numpy as np
from common.measuring import verdict
from numpy.typing import NDArray
from scipy.special import ndtri

from collegium.evaluation.estimates import (
    Arm,
    Estimate,
    estimate_auc,
    estimate_balanced_accuracy,
    estimate_mean,
    estimate_share,
)
from collegium.evaluation.intervals import error_bars, student
from collegium.evaluation.verdicts import outcome_of

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator], tuple[Estimate, Sequence[Arm]]]

PATIENT_SD, RESIDUAL_SD = 0.012, 0.010
SIZES = (6, 8, 12, 20, 40)
SHIFTS = (0.004, 0.008)
CANDIDATES = (1, 2, 5, 10)
LARGEST, LEVEL = 0.065, 0.05
POWER = {1: 0.999, 3: 0.84, 5: 0.95}
MEAN_POWER = {1: 0.999, 3: 0.88, 5: 0.95}
RELEVANT = 0.01


@dataclass(frozen=True)
class Cell:
    """A setting of which draws are judged.

    Attributes:
        grid: the line of the table that it belongs to.
        name: what sets it apart there.
        draw: makes one comparison.
    """

    grid: str
    name: str
    draw: Draw


def normal(rng: np.random.Generator, count: int) -> Array:
    """Return effects of patients that are normal."""
    return rng.normal(size=count)


def heteroscedastic(rng: np.random.Generator, count: int) -> Array:
    """Return normal effects whose sd is log-normal."""
    return rng.normal(size=count) * np.exp(rng.normal(0, 0.5, count) - 0.25)


def heavy(rng: np.random.Generator, count: int) -> Array:
    """Return effects of Student's t with three degrees of freedom."""
    return rng.standard_t(3, count) / sqrt(3)


def exponential(rng: np.random.Generator, count: int) -> Array:
    """Return skewed effects."""
    return rng.exponential(size=count) - 1


EFFECTS = {"normal": normal, "unequal sd": heteroscedastic, "t3": heavy, "skewed": exponential}


@dataclass(frozen=True)
class Means:
    """Draws of a score that is averaged over patients.

    Attributes:
        patients: how many there are.
        joined, alone: how many trainings each arm has.
        shift: sd between trainings of what they score at the site.
        effect: distribution of the patients' differences; None: the method against itself.
        candidates: how many methods were trained, of which the best on validation is compared.
        gain: by how much all of them are better.
        shifts: sd between trainings of training alone and each method, if they differ.
        adapted: whether each joined model is made of the reference's of the same training.
    """

    patients: int
    joined: int
    alone: int
    shift: float = 0.0
    effect: str | None = "normal"
    candidates: int = 1
    gain: float = 0.0
    shifts: tuple[float, ...] = ()
    adapted: bool = False

    def __call__(self, rng: np.random.Generator) -> tuple[Estimate, Sequence[Arm]]:
        """Return a comparison, and the arms of the methods that were not chosen."""
        shifts = self.shifts or (self.shift,) * (1 + self.candidates)
        alone = self._arm(rng, self.alone, shifts[0], None)[0]
        arms = [self._arm(rng, self.joined, s, self.effect) for s in shifts[1:]]
        if self.adapted:
            changed = alone + arms[0][0]
            return estimate_mean(changed, alone, same_trainings=True), ()
        chosen = max(range(self.candidates), key=lambda k: arms[k][1])
        found = [estimate_mean(scores + self.gain, alone) for scores, _ in arms]
        others = [estimate.arms[0] for k, estimate in enumerate(found) if k != chosen]
        return found[chosen], others

    def _arm(
        self, rng: np.random.Generator, trainings: int, shift: float, effect: str | None
    ) -> tuple[Array, float]:
        """Return test scores, and the mean on as many validation patients of the same trainings."""
        luck = rng.normal(0, shift, (1, trainings)) if shift else np.zeros((1, trainings))
        scores = luck + rng.normal(0, RESIDUAL_SD, (self.patients, trainings))
        valid = float(luck.mean())
        if self.candidates > 1:
            spread = sqrt((PATIENT_SD**2 + RESIDUAL_SD**2 / trainings) / self.patients)
            valid += float(rng.normal(0, spread))
        if effect:
            scores = scores + PATIENT_SD * EFFECTS[effect](rng, self.patients)[:, None]
        return scores, valid


def areas(
    rng: np.random.Generator, *, positive: int, negative: int, area: float, trainings: int = 1,
    shift: float = 0.0, eyes: bool = False,
) -> tuple[Estimate, Sequence[Arm]]:  # fmt: skip
    """Return a comparison of areas, of correlated scores of two equal arms."""
    apart = {0.5: 0.0, 0.76: 1.0, 0.92: 2.0}[area]
    labels = np.repeat([1, 0], [positive, negative])
    people = np.arange(labels.size)
    if eyes:  # two of each patient; the first of the healthy have one of each class
        labels, people = np.repeat(labels, 2), np.repeat(people, 2)
        labels[2 * positive : 4 * positive : 2] = 1
    common = rng.normal(size=labels.size)
    arms = []
    for _ in range(2):
        own = rng.normal(size=labels.size)[:, None]
        if eyes:
            own = 0.5 * own + 0.9 * rng.normal(size=people.max() + 1)[people][:, None]
        each = rng.normal(size=(labels.size, trainings))
        moved = apart + rng.normal(0, shift, trainings)
        noise = 0.6 * common[:, None] + 0.6 * own + 0.53 * each
        arms.append(labels[:, None] * moved + noise)
    return estimate_auc(arms[0], arms[1], labels, people), ()


def three_areas(
    rng: np.random.Generator, *, sizes: tuple[int, int, int], apart: float
) -> tuple[Estimate, Sequence[Arm]]:
    """Return a comparison of areas of three classes, each against the rest, of two equal arms."""
    labels = np.repeat([0, 1, 2], sizes)
    truth = apart * np.eye(3)[labels] + 0.8 * rng.normal(size=(labels.size, 3))
    arms = [truth[:, None] + 0.6 * rng.normal(size=(labels.size, 1, 3)) for _ in range(2)]
    return estimate_auc(arms[0], arms[1], labels, classes=3), ()


def shares(
    rng: np.random.Generator, *, positive: int, negative: int, right: float, trainings: int = 1,
    eyes: bool = False, traded: float = 0.0,
) -> tuple[Estimate, Sequence[Arm]]:  # fmt: skip
    """Return a comparison of sensitivity or balanced accuracy of two equal arms."""
    labels = np.repeat([1, 0], [positive, negative])
    people = np.arange(labels.size)
    if eyes:
        labels, people = np.tile([1, 0], positive), np.repeat(np.arange(positive), 2)
    truth = [np.full(labels.size, right)] * 2
    truth = [truth[0] + traded * np.where(labels == 1, 1, -1), truth[1]]
    arms = []
    for chance in truth:
        threshold = -sqrt(2) * ndtri(chance)
        luck = rng.normal(size=people.max() + 1)[people] if eyes else rng.normal(size=labels.size)
        each = rng.normal(size=(labels.size, trainings))
        arms.append((luck[:, None] + each > threshold[:, None]).astype(float))
    if not negative and not eyes:
        return estimate_share(*arms), ()
    return estimate_balanced_accuracy(arms[0], arms[1], labels, people), ()


def cells_of_means(sizes: Sequence[int], effects: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of means over patients, by grid."""
    for size, effect in product(sizes, effects):
        yield Cell("one training", f"n {size}, {effect}", Means(size, 1, 1, effect=effect))
    for trainings, size in product((3, 5), sizes):
        grid = f"{trainings} trainings"
        for effect, shift, count in product(effects, (0.0, *SHIFTS), CANDIDATES):
            if count == 1 or effect in ("normal", "skewed"):
                among = f", chosen among {count}" * (count > 1)
                draw = Means(size, trainings, trainings, shift, effect, count)
                name = f"n {size}, {effect}, u {shift:g}"
                yield Cell(f"{grid}{among}, u {'> 0' if shift else '= 0'}", name, draw)
        for count, shift in product(CANDIDATES, SHIFTS):
            among = f", chosen among {count}" * (count > 1)
            draw = Means(size, trainings, trainings, shift, None, count)
            yield Cell(f"{grid}{among}, against itself", f"n {size}, u {shift:g}", draw)
        for shifts in ((0.003, 0.012), (0.012, 0.003), (0.005, 0.03)):
            draw = Means(size, trainings, trainings, shifts=shifts)
            yield Cell("trainings of unequal sd", f"{trainings} trainings, {shifts}", draw)
        lucky = Means(size, trainings, trainings, candidates=6, shifts=(0.005, 0.03, *(0.005,) * 5))
        yield Cell("chosen among 6, one of them wild", f"{trainings} trainings, n {size}", lucky)
    for size, (joined, alone) in product(sizes, ((3, 5), (5, 3), (3, 10), (10, 3), (5, 10))):
        for shift, kind in product((0.004, 0.03), ("normal", None)):
            draw = Means(size, joined, alone, shift, kind)
            name = f"{joined} against {alone}, n {size}, u {shift}, {kind or 'itself'}"
            yield Cell("unequal numbers of trainings", name, draw)


def cells_of_classes() -> Iterator[Cell]:
    """Yield the cells of areas and shares, by grid."""
    for (m, k), area in product(((6, 34), (10, 90), (30, 30)), (0.5, 0.76, 0.92)):
        draw = partial(areas, positive=m, negative=k, area=area)
        yield Cell("area, one training", f"{m}/{k}, AUC {area}", draw)
    for (m, k), trainings in product(((6, 34), (10, 90), (30, 30)), (3, 5)):
        for shift in (0.15, 0.3):
            draw = partial(
                areas, positive=m, negative=k, area=0.76, trainings=trainings, shift=shift
            )
            yield Cell("area, 3 and 5 trainings", f"{m}/{k}, {trainings}, shift {shift}", draw)
    for m, k in ((6, 12), (10, 30), (20, 40)):
        draw = partial(areas, positive=m, negative=k, area=0.76, eyes=True)
        yield Cell("area, two eyes a patient", f"{m}/{k}", draw)
    for positive, right, trainings in product((20, 35, 60), (0.6, 0.8), (1, 3)):
        draw = partial(shares, positive=positive, negative=0, right=right, trainings=trainings)
        yield Cell("sensitivity", f"{positive}, {right}, {trainings} trainings", draw)
    for (m, k), trainings in product(((6, 34), (10, 90), (15, 15), (30, 30)), (1, 3, 5)):
        for right, traded in ((0.6, 0.0), (0.8, 0.0), (0.6, 0.3)):
            draw = partial(
                shares, positive=m, negative=k, right=right, trainings=trainings, traded=traded
            )
            name = f"{m}/{k}, {right}, traded {traded}, {trainings} trainings"
            yield Cell("balanced accuracy", name, draw)
    for patients, trainings in product((12, 20, 40), (1, 3)):
        draw = partial(
            shares, positive=patients, negative=0, right=0.7, trainings=trainings, eyes=True
        )
        name = f"{patients}, {trainings} trainings"
        yield Cell("balanced accuracy, an eye of each class", name, draw)
    for sizes, apart in product(((6, 10, 34), (20, 20, 20)), (0.0, 1.0)):
        name = f"{'/'.join(map(str, sizes))}, {apart} apart"
        yield Cell("area of three classes", name, partial(three_areas, sizes=sizes, apart=apart))


def cells_of_adapters(sizes: Sequence[int]) -> Iterator[Cell]:
    """Yield the cells of models before and after they are adapted, by grid."""
    for trainings, size, shift in product((3, 5), sizes, (0.0, *SHIFTS)):
        draw = Means(size, trainings, trainings, shift, adapted=True)
        yield Cell("adapted", f"{trainings} trainings, n {size}, u {shift:g}", draw)


def wrong(cell: Cell, draws: int, seed: int) -> float:
    """Return the share of draws with a yes or a no where there is nothing."""
    rng, said = np.random.default_rng([seed, draws]), 0
    for _ in range(draws):
        estimate, others = cell.draw(rng)
        half = error_bars(estimate, others).half_width
        said += abs(estimate.centre or 0.0) > half
    return said / draws


def type_one(cells: Sequence[Cell], draws: int, *, shown: bool) -> bool:
    """Print the errors of each grid, and return whether all are as few as accepted.

    A cell with more than the largest accepted share is drawn again, and more often;
    the second share counts.
    """
    grids: dict[str, list[tuple[float, float, str]]] = {}
    for seed, cell in enumerate(cells):
        first = last = wrong(cell, draws, seed)
        if first > LARGEST:
            last = wrong(cell, max(4000, 3 * draws), seed)
        grids.setdefault(cell.grid, []).append((last, first, cell.name))
        if shown:
            print(f"  {cell.grid}: {cell.name}: {first:.3f} {last:.3f}", flush=True)
    noise = sqrt(LEVEL * (1 - LEVEL) / draws)
    print(f"type I error, {draws} draws a cell, each give or take {noise:.4f}: mean (largest)")
    means = []
    for grid, found in grids.items():
        mean, (most, _, where) = float(np.mean([first for _, first, _ in found])), max(found)
        means.append((mean, round(LEVEL + 2 * noise / sqrt(len(found)), 4)))
        print(f"  {grid:42} {mean:.3f} ({most:.3f} at {where}), {len(found)} cells")
    mean, limit = max(means, key=lambda pair: pair[0] - pair[1])
    largest = max(found[0] for cells in grids.values() for found in cells)
    good = [
        verdict("verdict, type I error, mean of the worst grid", mean, limit),
        verdict("verdict, type I error, largest of a cell", largest, LARGEST),
    ]
    return all(good)


def power(sizes: Sequence[int], effects: Sequence[str], draws: int) -> bool:
    """Print what is found by what a paired t-test finds, and return whether that is enough."""
    good = []
    for trainings in POWER:
        ratios = []
        sd = sqrt(PATIENT_SD**2 + 2 * RESIDUAL_SD**2 / trainings)
        for seed, (size, effect) in enumerate(product(sizes, effects)):
            t = student(0.025, size - 1) + student(0.2, size - 1)
            draw = Means(size, trainings, trainings, effect=effect, gain=t * sd / sqrt(size))
            rng, found, reference = np.random.default_rng([seed, trainings]), 0, 0
            for _ in range(draws):
                estimate, _ = draw(rng)
                centre, spread = estimate.centre or 0.0, sqrt(estimate.variance or 0.0)
                found += centre > error_bars(estimate).half_width
                reference += centre > student(0.025, size - 1) * spread
            ratios.append(found / reference)
        name = f"verdict, power by that of a paired t, {trainings} trainings"
        noise = 0.0 if draws >= 1000 else 0.02
        good += [
            verdict(f"{name}, mean", float(np.mean(ratios)), MEAN_POWER[trainings], least=True),
            verdict(f"{name}, least", min(ratios), POWER[trainings] - noise, least=True),
        ]
    return all(good)


def detectable(sizes: Sequence[int], draws: int) -> bool:
    """Print how often the smallest detectable difference is found; return whether it mostly is."""
    found = []
    for trainings, size, shift in product((1, 3, 5), sizes, (0.0, *SHIFTS)):
        if trainings == 1 and shift:
            continue
        rng = np.random.default_rng([size, trainings])
        draw = Means(size, trainings, trainings, shift)
        least = [error_bars(draw(rng)[0]).smallest_detectable for _ in range(draws)]
        gain = float(np.median(least))
        draw = Means(size, trainings, trainings, shift, gain=gain)
        bars = [(e.centre or 0.0, error_bars(e).half_width) for e, _ in (draw(rng) for _ in least)]
        found.append(float(np.mean([centre > half for centre, half in bars])))
        print(
            f"  {trainings} trainings, n {size}, u {shift:g}: {gain:.4f} found in {found[-1]:.2f}"
        )
    return verdict(
        "verdict, smallest detectable difference is found", float(np.mean(found)), 0.75, least=True
    )


def equivalence(sizes: Sequence[int], draws: int) -> bool:
    """Print how often no relevant difference is said at a relevant one."""
    said = []
    for trainings, size, shift in product((1, 3, 5), sizes, (0.0, *SHIFTS)):
        if trainings == 1 and shift:
            continue
        rng = np.random.default_rng([size, trainings])
        draw = Means(size, trainings, trainings, shift, gain=RELEVANT)
        outcomes = []
        for _ in range(draws):
            estimate, _ = draw(rng)
            centre, half = estimate.centre or 0.0, error_bars(estimate).half_width
            outcomes.append(outcome_of(centre - half, centre + half, relevant=RELEVANT))
        said.append(outcomes.count("equivalent") / draws)
    limit = LEVEL if draws >= 1000 else LEVEL + 0.02
    return verdict("verdict, equivalence at a relevant difference, largest", max(said), limit)


def main() -> int:
    """Simulate, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells and draws")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    options = parser.parse_args()
    start = time.perf_counter()
    sizes = (6, 20) if options.quick else SIZES
    effects = ("normal", "skewed") if options.quick else tuple(EFFECTS)
    draws = 200 if options.quick else 1000
    cells = [*cells_of_means(sizes, effects), *cells_of_classes(), *cells_of_adapters(sizes)]
    good = [
        type_one(cells, draws, shown=options.cells),
        power(sizes, effects, draws),
        detectable(sizes, max(200, draws // 2)),
        equivalence(sizes, draws),
    ]
    print(f"{len(cells)} cells in {time.perf_counter() - start:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
