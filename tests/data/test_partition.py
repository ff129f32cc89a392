"""Which case belongs to which site, against draws and counts of one's own."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.data.discovery import from_manifest
from collegium.data.partition import (
    COLUMNS,
    PartitionCase,
    SiteAssignment,
    by_column,
    by_dirichlet,
    by_ratio,
    by_value,
    lack_channels,
    write_manifest,
)
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError, StorageError


def members(values: Sequence[float]) -> list[PartitionCase]:
    """A patient of one case for each value."""
    return [PartitionCase(f"c{i:03}", f"p{i:03}", value) for i, value in enumerate(values)]


def of_sites(sites: SiteAssignment) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for case, site in sites.items():
        found[site].append(case)
    return dict(found)


def sizes(sites: SiteAssignment) -> list[int]:
    return [len(cases) for _, cases in sorted(of_sites(sites).items())]


def test_by_value_hands_out_contiguous_blocks_of_the_sorted_values() -> None:
    values = np.random.default_rng(0).permutation(17).astype(float)
    sites = by_value(members(values.tolist()), [5, 2, 10])
    blocks = [
        sorted(int(values[int(case[1:])]) for case in cases)
        for _, cases in sorted(of_sites(sites).items())
    ]
    assert blocks == [[*range(5)], [5, 6], [*range(7, 17)]]


def test_by_value_gives_the_first_sites_what_is_left_over() -> None:
    assert sizes(by_value(members([*range(11)]), 3)) == [4, 4, 3]
    assert sizes(by_value(members([*range(3)]), 3)) == [1, 1, 1]


def test_by_value_orders_equal_values_by_patient_whatever_the_order_of_the_cases() -> None:
    alike = members([2.0] * 6)
    expected = {f"c00{i}": f"site_{i // 2 + 1}" for i in range(6)}
    assert by_value(alike, 3) == expected
    assert by_value(alike[::-1], 3) == expected


def test_by_value_counts_a_patient_by_the_mean_over_cases() -> None:
    # means: a 5, b 4, c 6; by their first case the order would be a, c, b
    cases = [
        PartitionCase(case, case[0], value)
        for case, value in (("a1", 0), ("a2", 10), ("b1", 4), ("c1", 1), ("c2", 11))
    ]
    sites = by_value(cases, 3)
    assert sites == {"b1": "site_1", "a1": "site_2", "a2": "site_2", "c1": "site_3", "c2": "site_3"}


@pytest.mark.parametrize("wanted", [0, 6, [2, 2], [5, 0], [], [-1, 6]])
def test_sizes_that_do_not_add_up_are_refused(wanted: list[int] | int) -> None:
    with pytest.raises(ConfigError, match=r"5 patients"):
        by_value(members([*range(5)]), wanted)


@pytest.mark.parametrize(
    ("positive", "negative", "ratios", "each"),
    [
        (20, 100, [1, 2, 4, 7], 5),  # 4 sites share 20 positives; 5 + 10 + 20 + 35 negatives of 100
        (40, 56, [1, 2, 4, 7], 4),  # the negatives allow 4 for each
        (9, 27, [1, 2, 4], 3),
        (30, 30, [0.1, 0.1, 0.1], 10),
    ],
)
def test_by_ratio_gives_every_site_its_exact_ratio(
    positive: int, negative: int, ratios: list[float], each: int
) -> None:
    cases = members([1.0] * positive + [0.0] * negative)
    sites = by_ratio(cases, ratios, seed=3)
    value = {member.case: member.value for member in cases}
    counts = {
        site: Counter(value[case] for case in found) for site, found in of_sites(sites).items()
    }
    assert counts == {
        f"site_{number}": Counter({1.0: each, 0.0: round(each * ratio)})
        for number, ratio in enumerate(ratios, 1)
    }


def test_by_ratio_rounds_alike_at_every_site() -> None:
    # one and a half negatives for a positive are rounded to two, so that two sites need four
    with pytest.raises(ConfigError, match="2 positive and 3 negative patients are too few"):
        by_ratio(members([1, 1, 0, 0, 0]), [1.5, 1.5])
    assert sizes(by_ratio(members([1, 1, 0, 0, 0, 0]), [1.5, 1.5])) == [3, 3]


@pytest.mark.parametrize("ratios", [[], [1, 0], [-1.0], [9.0], [0.2, 0.2]])
def test_ratios_that_cannot_be_are_refused(ratios: list[float]) -> None:
    with pytest.raises(ConfigError, match="ratios"):
        by_ratio(members([1, 1, 0, 0]), ratios)


def test_by_ratio_takes_a_patient_for_positive_where_one_case_is() -> None:
    cases = [
        PartitionCase("a1", "a", 0), PartitionCase("a2", "a", 3),
        PartitionCase("b1", "b", 0), PartitionCase("b2", "b", 0),
    ]  # fmt: skip
    assert by_ratio(cases, [1]) == dict.fromkeys(("a1", "a2", "b1", "b2"), "site_1")


def test_by_dirichlet_is_what_numpy_draws() -> None:
    labels = [0] * 30 + [1] * 50
    sites = by_dirichlet(members(labels), 3, alpha=2.0, seed=5)
    rng = np.random.default_rng(5)
    expected = {}
    for first, count in ((0, 30), (30, 50)):
        shares = rng.dirichlet(np.full(3, 2.0))
        shuffled = first + rng.permutation(count)
        borders = np.rint(np.cumsum(shares) * count)
        for place, case in enumerate(shuffled):
            number = int((place >= borders).sum()) + 1
            expected[f"c{case:03}"] = f"site_{number}"
    assert len(set(expected.values())) == 3  # so that the first draw counts
    assert sites == expected


def unevenness(alpha: float) -> float:
    """How far the sites' shares of the classes are from those of the whole, over ten seeds."""
    labels = [0, 1, 2, 3] * 50
    apart = []
    for seed in range(10):
        sites = by_dirichlet(members(labels), 4, alpha, seed)
        for cases in of_sites(sites).values():
            counts = np.bincount([labels[int(case[1:])] for case in cases], minlength=4)
            apart.append(np.abs(counts / counts.sum() - 0.25).sum() / 1.5)
    return fmean(apart)


def test_a_small_alpha_gives_few_classes_and_a_large_one_equal_sites() -> None:
    assert unevenness(0.05) > 0.7
    assert unevenness(1000.0) < 0.06
    counts = sizes(by_dirichlet(members([0, 1] * 100), 4, alpha=1e4))
    assert max(counts) - min(counts) <= 8


def test_by_dirichlet_draws_anew_until_every_site_has_enough() -> None:
    labels = [0, 1, 2] * 20
    starts = [min([*sizes(by_dirichlet(members(labels), 4, 0.3, seed)), 9]) for seed in range(8)]
    assert min(starts) < 8  # some first draws would not do
    for seed in range(8):
        assert min(sizes(by_dirichlet(members(labels), 4, 0.3, seed, least=8))) >= 8


def test_by_dirichlet_takes_the_class_of_most_cases_and_of_equally_many_the_lower() -> None:
    mixed = [
        PartitionCase("a1", "a", 2), PartitionCase("a2", "a", 1), PartitionCase("a3", "a", 1),
        PartitionCase("b1", "b", 5), PartitionCase("b2", "b", 1),
    ]  # fmt: skip
    plain = [PartitionCase(m.case, m.patient, 1) for m in mixed]  # so both patients are of class 1
    for seed in range(5):
        assert by_dirichlet(mixed, 2, 1.0, seed) == by_dirichlet(plain, 2, 1.0, seed)


@pytest.mark.parametrize(
    ("sites", "alpha", "least"), [(0, 1.0, 1), (2, 0.0, 1), (2, -1.0, 1), (6, 1.0, 1), (2, 1.0, 3)]
)
def test_what_dirichlet_cannot_do_is_refused(sites: int, alpha: float, least: int) -> None:
    with pytest.raises(ConfigError, match="5 patients"):
        by_dirichlet(members([0, 1, 0, 1, 0]), sites, alpha, least=least)


def test_an_alpha_that_never_gives_enough_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha 1e-05 leaves a site with fewer than 2 patients"):
        by_dirichlet(members([0.0] * 8), 3, 1e-5, least=2)


GROUPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=12, max_size=40).filter(
    lambda drawn: len({patient for patient, _ in drawn}) >= 4
)
HOW: list[Callable[[list[PartitionCase]], SiteAssignment]] = [
    lambda cases: by_value(cases, 3),
    lambda cases: by_dirichlet(cases, 2, 5.0, seed=1),
    lambda cases: by_ratio(cases, [1.0], seed=1),
]


@pytest.mark.parametrize("how", HOW)
@settings(deadline=None, max_examples=40)
@given(drawn=GROUPS)
def test_no_patient_is_cut(
    how: Callable[[list[PartitionCase]], SiteAssignment], drawn: list[tuple[int, int]]
) -> None:
    cases = [
        PartitionCase(f"c{i}", f"p{patient}", value if patient % 2 else 0)
        for i, (patient, value) in enumerate(drawn)
    ]
    try:
        sites = how(cases)
    except ConfigError:
        return  # too few of a kind
    homes = defaultdict(set)
    for member in cases:
        homes[member.patient].add(sites.get(member.case))
    assert all(len(found) == 1 for found in homes.values())
    assert how(cases) == sites


def test_by_column_makes_a_site_of_each_word() -> None:
    assert by_column({"a": "GE ", "b": "Siemens", "c": "GE"}) == {
        "a": "GE", "b": "Siemens", "c": "GE",
    }  # fmt: skip
    with pytest.raises(DataError, match="2 cases have no word in this column"):
        by_column({"a": "GE", "b": " ", "c": ""})


def test_each_site_lacks_one_channel_in_turn() -> None:
    assert lack_channels(["a", "b", "c", "d"], 3) == {
        "a": (1, 2), "b": (0, 2), "c": (0, 1), "d": (1, 2),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="a site with 1 channel can lack none"):
        lack_channels(["a"], 1)


def case(folder: Path, name: str, *, target: str | None = None) -> Case:
    """A case whose files are there."""
    paths = {}
    for kind in ("image", "label", "fov"):
        paths[kind] = folder / f"{name} {kind}, 1.nii"
        paths[kind].touch()
    label = None if target else paths["label"]
    fov = paths["fov"] if name == "b" else None
    return Case("pool", name, f"patient {name}", (paths["image"],), label, fov, target=target)


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    cases = [
        replace(case(tmp_path / "data", "a"), split="test"),
        replace(case(tmp_path / "data", "b"), series="1.2.3"),
        case(tmp_path / "data", "c", target='ill, "very"'),
        case(tmp_path / "data", "d"),
        replace(
            case(tmp_path / "data", "e"), channels=(2, 0),
            images=(tmp_path / "data/e image, 1.nii", tmp_path / "data/a image, 1.nii"),
        ),
    ]  # fmt: skip
    sites = {"e": "süd", "a": "north", "b": "süd", "c": "north"}
    path = tmp_path / "new" / "folder" / "m.csv"
    write_manifest(path, cases, sites, tmp_path / "data")
    assert path.read_text("utf-8").splitlines()[0] == ",".join(COLUMNS)
    assert str(tmp_path) not in path.read_text("utf-8")  # its paths are relative to the root
    for site in ("north", "süd"):
        found, problems = from_manifest(site, tmp_path / "data", path)
        assert problems == []
        expected = [c for c in cases if sites.get(c.case) == site]
        assert [c.site for c in found] == [site] * len(expected)
        about = ("case", "patient", "images", "label", "fov", "split", "target", "series",
                 "channels")  # fmt: skip
        for mine, theirs in zip(found, expected, strict=True):
            assert {k: getattr(mine, k) for k in about} == {k: getattr(theirs, k) for k in about}


def test_files_outside_the_root_are_found_again(tmp_path: Path) -> None:
    for name in ("data", "root"):
        (tmp_path / name).mkdir()
    one = case(tmp_path / "data", "a")
    write_manifest(tmp_path / "root" / "m.csv", [one], {"a": "A"}, tmp_path / "root")
    (found,), problems = from_manifest("A", tmp_path / "root", tmp_path / "root" / "m.csv")
    assert problems == []
    assert found.images[0].resolve() == one.images[0].resolve()


def test_what_a_manifest_cannot_hold_is_refused(tmp_path: Path) -> None:
    barred = Case("pool", "a", "a", (tmp_path / "0|1.nii",), tmp_path / "l.nii")
    with pytest.raises(ConfigError, match=r"case a: 0\|1\.nii has a '\|' in its name"):
        write_manifest(tmp_path / "m.csv", [barred], {"a": "A"}, tmp_path)
    write_manifest(tmp_path / "m.csv", [barred], {}, tmp_path)  # it has no site
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"m\.csv cannot be written \("):
        write_manifest(tmp_path / "file" / "m.csv", [], {}, tmp_path)
