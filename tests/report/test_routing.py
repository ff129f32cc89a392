import pytest

from collegium.report.routing import Routes, gather_adaptations, shades


def account(seed=0, adapter="routing", **changes):
    return {
        "adapter": {"name": adapter, "label": adapter}, "algorithm": "iopfl", "seed": seed,
        "site": "hrf", "sources": ["global", "a"], "cases": 45, "steps": 10 + seed, "seconds": 4.0,
        "losses": [], "chosen": None, "coefficients": None, "notes": [],
    } | changes  # fmt: skip


def coefficients(*rows, layers=("down", "up")):
    return {"layers": list(layers), "sources": ["global", "a"], "values": [list(r) for r in rows]}


def test_seeds_of_one_adapter_are_brought_together():
    accounts = [
        account(1, notes=["n"], coefficients=coefficients((0.4, 0.6), (0.2, 0.8))),
        account(0, notes=["n", "m"], coefficients=coefficients((0.6, 0.4), (0.4, 0.6))),
        account(0, "none"),
    ]
    none, routing = gather_adaptations(accounts, ["iopfl"])
    assert (none.name, none.routes, none.seeds) == ("IOP-FL", None, (0,))
    assert (routing.name, routing.seeds, routing.steps) == ("IOP-FL + routing", (0, 1), 10.5)
    assert routing.notes == ("n", "m")
    assert routing.routes is not None
    assert [x for row in routing.routes.values for x in row] == pytest.approx([0.5, 0.5, 0.3, 0.7])
    assert routing.routes.means == pytest.approx((0.4, 0.6))
    assert routing.routes.favourite == "a"


def test_coefficients_of_another_network_are_not_averaged_in():
    accounts = [
        account(0, coefficients=coefficients((0.6, 0.4), (0.4, 0.6))),
        account(1, coefficients=coefficients((0.0, 1.0), layers=["other"])),
    ]
    (found,) = gather_adaptations(accounts, [])
    assert found.routes is not None
    assert found.routes.values == ((0.6, 0.4), (0.4, 0.6))


def test_losses_of_several_cases_are_averaged_by_step():
    losses = [
        {"step": 0, "total": 2.0, "shape": 1.0},
        {"step": 0, "total": 4.0, "shape": None},
        {"step": 1, "total": 1.0},
    ]
    (found,) = gather_adaptations([account(losses=losses)], [])
    (line,) = found.losses  # the shape has a single step, which is no line
    assert (line.name, dict(line.points)) == ("total", {0: 3.0, 1: 1.0})
    low, high = found.frame
    assert low < 1.0 < 3.0 < high


def test_shades_reach_from_the_smallest_to_the_largest():
    routes = Routes(("down", "up"), ("global", "a"), ((0.25, 0.75), (0.5, 0.5)))
    assert shades(routes) == [
        ("down", [{"text": "0.250", "shade": 0}, {"text": "0.750", "shade": 88}]),
        ("up", [{"text": "0.500", "shade": 44}, {"text": "0.500", "shade": 44}]),
    ]
    equal = Routes(("down",), ("global", "a"), ((0.5, 0.5),))
    assert [cell["shade"] for cell in shades(equal)[0][1]] == [0, 0]
