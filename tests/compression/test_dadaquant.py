import math
from typing import Any

import numpy as np
import pytest
import torch

from collegium.compression.base import ClientReport
from collegium.compression.dadaquant import DAdaQuant
from collegium.core.message import pack, unpack
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(codec: DAdaQuant, update: Tensors, seed: int = 0, **options: Any) -> Tensors:
    return codec.encode(update, rng(seed), options).decoded


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 4, 60])
def test_the_mean_of_many_draws_is_the_update(norm: Any, levels: int):
    times, row = 20_000, torch.tensor([0.3, -2.0, 0.0, 1e-3, 1.37, -0.9])
    rows = row.expand(times, len(row))
    found = decoded(DAdaQuant(minimum=levels, norm=norm), Tensors({"a": rows}))["a"].double()
    step = float(rows.norm() if norm == "l2" else 2) / levels
    # the variance of a draw is that of one of two levels, step apart
    part = (row.double().abs() / step) % 1
    deviation = step * (part * (1 - part) / times).sqrt()
    assert ((found.mean(0) - row).abs() <= 4.5 * deviation + 1e-6).all()
    often = part * (1 - part) > 0.02
    np.testing.assert_allclose(found.std(0)[often], (deviation * times**0.5)[often], rtol=0.05)


@pytest.mark.parametrize("levels", [1, 2, 7, 256])
def test_every_number_is_one_of_the_two_levels_next_to_it(levels: int, update: Tensors):
    for name, found in decoded(DAdaQuant(), update, levels=levels).items():
        if update[name].numel() == 0:
            continue
        exact, got = update[name].double(), found.double()
        step = float(exact.abs().max()) / levels
        assert ((got - exact).abs() <= step * (1 + 1e-6)).all()
        np.testing.assert_allclose(got / step, (got / step).round(), atol=1e-4)
        assert (got * exact >= 0).all()


@pytest.mark.parametrize(
    ("codec", "sparse"),
    [
        (DAdaQuant(minimum=1), True),
        (DAdaQuant(minimum=3), True),
        (DAdaQuant(minimum=4), False),
        (DAdaQuant(minimum=60, norm="l2"), True),
    ],
)
def test_it_is_sparse_where_most_numbers_of_a_normal_distribution_become_zero(
    codec: DAdaQuant, sparse: bool
):
    numbers = Tensors({"a": torch.randn(100_000, generator=rng(7))})
    zeros = float((decoded(codec, numbers)["a"] == 0).double().mean())
    assert (zeros > 0.5) == codec.is_sparse == sparse


def test_numbers_are_drawn_each_for_itself(update: Tensors):
    halves = Tensors({"a": torch.cat([torch.ones(1), torch.full((9999,), 0.5)])})
    up = decoded(DAdaQuant(minimum=1), halves)["a"][1:] == 1
    assert abs(float(up.float().mean()) - 0.5) < 0.025
    assert abs(float((up[1:] != up[:-1]).float().mean()) - 0.5) < 0.025
    one, other = (decoded(DAdaQuant(), update, seed)["head.weight"] for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("levels", [1, 4, 16, 64])
def test_bytes_stay_near_the_entropy_of_each_tensor(levels: int):
    shapes = {"a": (64, 64, 3, 3), "b": (50, 40), "c": (64,), "d": (300, 300)}
    update = Tensors({n: torch.randn(s, generator=rng(len(n))) ** 3 for n, s in shapes.items()})
    data, found = DAdaQuant(minimum=levels).encode(update, rng(), {})
    bits = 0.0
    for name, tensor in found.items():
        symbols = (tensor.double() * levels / update[name].abs().max()).round()
        counts = np.unique(symbols, return_counts=True)[1]
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    assert len(data) * 8 < 1.03 * bits + 8 * 4 * len(shapes)


def test_levels_ordered_are_used_and_told_to_the_receiver(update: Tensors):
    data, found = DAdaQuant().encode(update, rng(), {"levels": 1000})
    assert float((found - update).dot(found - update)) < 1e-4 * update.dot(update)
    again = DAdaQuant().decode(data, update)
    assert all(torch.equal(again[name], found[name]) for name in update)


@pytest.mark.parametrize("levels", [0, -1, 1 << 16, 2.5, "4"])
def test_options_that_cannot_be_followed_are_refused(levels: Any, update: Tensors):
    with pytest.raises(ProtocolError, match=r"the server set .* levels"):
        DAdaQuant().encode(update, rng(), {"levels": levels})


def rounds(codec: DAdaQuant, losses: list[float | None]) -> list[int]:
    """Levels of one client, round by round, given its losses; the state is stored in between."""
    state: dict[str, Any] = {}
    found = [codec.plan(state, {}).get("a", {}).get("levels", codec.minimum)]
    for loss in losses:
        state = unpack(pack(state))
        found.append(codec.plan(state, {"a": ClientReport(loss, 10)})["a"]["levels"])
    return found


def test_levels_double_when_the_running_loss_has_not_fallen_for_a_while():
    codec = DAdaQuant(patience=2, smoothing=0.5)
    # running losses 1, 1, 1 -> 2 levels; 1, 1 -> 4; then .5, .25 below: it stays; 2.1 above .5: 8
    assert rounds(codec, [1, 1, 1, 1, 1, 0, 0, 4]) == [1, 1, 1, 2, 2, 4, 4, 4, 8]
    assert rounds(codec, [5, 4, 3, 2, 1, 0.5]) == [1] * 7
    assert rounds(codec, [None, 1, None, 1, 1]) == [1, 1, 1, 1, 1, 2]
    assert rounds(codec, [1, math.nan, 1, 1]) == [1, 1, 1, 1, 2]


def test_levels_stop_at_the_maximum_and_stay_where_time_does_not_count():
    codec = DAdaQuant(minimum=3, maximum=10, patience=1)
    assert rounds(codec, [1] * 6) == [3, 3, 6, 10, 10, 10, 10]
    assert rounds(DAdaQuant(minimum=3, patience=1, adapt="clients"), [1] * 6) == [3] * 7


def test_the_loss_is_the_mean_by_the_clients_weights():
    codec, state = DAdaQuant(smoothing=0.75), {}  # type: tuple[DAdaQuant, dict[str, Any]]
    codec.plan(
        state, {"a": ClientReport(2, 30), "b": ClientReport(6, 10), "c": ClientReport(None, 99)}
    )
    codec.plan(state, {"a": ClientReport(1, 1)})
    assert state["running"] == pytest.approx([3, 0.75 * 3 + 0.25 * 1])


def test_clients_of_more_weight_get_more_levels_at_the_same_variance():
    weights = {"a": 8.0, "b": 64.0, "c": 27.0}
    state: dict[str, Any] = {"levels": 1000}
    reports = {client: ClientReport(None, weight) for client, weight in weights.items()}
    options = DAdaQuant(maximum=1 << 15).plan(state, reports)
    levels = np.array([options[client]["levels"] for client in sorted(weights)], float)
    shares = np.array([weights[client] for client in sorted(weights)]) / 99
    np.testing.assert_allclose(levels / levels[0], [1, 4, 9 / 4], rtol=2e-3)  # (w / 8) ** (2 / 3)
    same = (shares**2 / 1000**2).sum()
    np.testing.assert_allclose((shares**2 / levels**2).sum(), same, rtol=2e-3)
    assert levels.sum() < 3 * 1000


def test_equal_clients_and_clients_without_weight_get_the_level_of_all():
    for weight in (0.0, 5.0):
        state: dict[str, Any] = {"levels": 12}
        options = DAdaQuant().plan(state, {c: ClientReport(None, weight) for c in "abc"})
        assert options == {c: {"levels": 12} for c in "abc"}


def test_a_client_that_missed_a_round_keeps_its_share():
    codec, state = DAdaQuant(minimum=40), {}  # type: tuple[DAdaQuant, dict[str, Any]]
    first = codec.plan(state, {"a": ClientReport(1, 1), "b": ClientReport(1, 8)})
    assert codec.plan(state, {"b": ClientReport(1, 8)}) == first
    assert first["b"]["levels"] == pytest.approx(4 * first["a"]["levels"], abs=2)


@pytest.mark.parametrize(
    "wrong",
    [{"minimum": 0}, {"minimum": 9, "maximum": 8}, {"maximum": 1 << 16}, {"patience": 0},
     {"smoothing": 1.0}, {"smoothing": -0.1}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match="DAdaQuant"):
        DAdaQuant(**wrong)
