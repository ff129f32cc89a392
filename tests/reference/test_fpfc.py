import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from collegium.algorithms import _fpfc_pairs
from collegium.algorithms.fpfc import FPFC
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.runtime.participation import Participation

ROUNDS = 4
LAM, RHO, A, XI = 3.0, 0.9, 3.0, 0.2


def shrunk(d: Any) -> Any:
    """argmin g(||theta||) + rho/2 ||theta - d||^2, by the root of its derivative along d."""
    r = np.sqrt((d**2).sum())

    def slope(t: float) -> float:
        scad = LAM * t / XI if t <= XI else LAM if t <= LAM else max(0.0, (A * LAM - t) / (A - 1))
        return float(scad + RHO * (t - r))

    return brentq(slope, 0.0, r, xtol=1e-15) / r * d if r else d


@pytest.mark.parametrize("r", [0.0, 0.5, 3.5, 3.6, 6.2, 6.5, 8.0, 8.9, 9.1, 15.0])
def test_differences_shrink_to_the_minimum_of_the_smoothed_scad_penalty(r: float) -> None:
    direction = np.array([0.6, -0.8])
    method = FPFC(lam=LAM, rho=RHO, a=A, smoothing=XI)
    found = _fpfc_pairs.shrunk(Tensors({"w": torch.tensor(r * direction)}), method)["w"]
    np.testing.assert_allclose(found, shrunk(r * direction), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", ["all", "head"])
def test_models_are_trained_towards_zeta_and_the_server_updates_every_pair(
    federation: Any, by_hand: Any, part: Any
) -> None:
    """A and B are absent in the third round: their pair stays, those with C are updated."""
    method = FPFC(lam=LAM, rho=RHO, a=A, smoothing=XI, part=part, warm_up=1)
    absent = Participation(absent={"A": (3,), "B": (3,)})
    outcome = federation.run(method, rounds=ROUNDS, participation=absent)
    fused = sorted(by_hand.HEAD if part == "head" else by_hand.PARAMETERS)
    rest = by_hand.PARAMETERS - {*fused}
    start = federation.initial()
    own, sites = dict.fromkeys(federation.names, start), federation.names
    body = by_hand.select(start, rest)
    size = sum(start[n].size for n in fused)
    theta, v = np.zeros((3, 3, size)), np.zeros((3, 3, size))
    for t in range(1, ROUNDS + 1):
        w = np.stack([np.concatenate([own[c][n].ravel() for n in fused]) for c in sites])
        zeta = [
            np.mean([w[j] + theta[i, j] - v[i, j] / RHO for j in range(3)], 0) for i in range(3)
        ]
        answered = [2] if t == 3 else [0, 1, 2]
        for i in answered:
            cuts = np.cumsum([start[n].size for n in fused])[:-1]
            aim = dict(zip(fused, np.split(zeta[i], cuts), strict=True))

            def pulled(gradient: Any, now: Any, aim: Any = aim, t: int = t) -> Any:
                pull = {n: RHO * (now[n] - aim[n].reshape(now[n].shape)) for n in fused}
                return {n: g + (pull.get(n, 0) if t > 1 else 0) for n, g in gradient.items()}

            name, lr = sites[i], 0.1 * 0.8 ** (t - 1)
            own[name] = by_hand.train(
                own[name] | body, federation.data[name], federation.batches(name, t), lr,
                change=pulled,
            )[0]  # fmt: skip
            by_hand.assert_same(outcome.clients[t][name]["model"], own[name], f"{t} {name}")
        w = np.stack([np.concatenate([own[c][n].ravel() for n in fused]) for c in sites])
        for i, j in itertools.permutations(range(3), 2):
            if not {i, j} & {*answered}:
                continue
            d = w[i] - w[j] + v[i, j] / RHO
            theta[i, j] = d if t == 1 else shrunk(d)
            v[i, j] += RHO * (w[i] - w[j] - theta[i, j])
        for i, j in itertools.combinations(range(3), 2):
            for expected, found in ((theta, "theta"), (v, "v")):
                kept = outcome.server[t][found][sites[i]][sites[j]]
                flat = np.concatenate([kept[n].ravel() for n in fused])
                np.testing.assert_allclose(flat, expected[i, j], rtol=1e-9, atol=1e-12)
        if part == "head":
            mean = by_hand.average([own[sites[i]] for i in answered], [1] * len(answered))
            body = by_hand.select(mean, rest)
        by_hand.assert_same(outcome.server[t]["body"], body, f"round {t}")
    assert np.abs(v).max() > 0.1


def test_it_refuses_settings_and_networks_that_cannot_work(federation: Any) -> None:
    with pytest.raises(ConfigError, match="must be more than 1"):
        FPFC(rho=0.3)
    with pytest.raises(ConfigError, match="must be at most lam"):
        FPFC(lam=0.1, smoothing=0.2)
    with pytest.raises(ConfigError, match="network has none"):
        FPFC(part="head").check_setup(["A", "B"], find_parts(torch.nn.PReLU()))
