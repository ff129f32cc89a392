from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms.fedamp import FedAMP
from collegium.algorithms.local import Local
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

ROUNDS = 3
ALPHA, SIGMA, LAM = 0.7, 1.3, 0.6


def attention(flat: Any, kind: str, *, relative: bool) -> Any:
    """xi by the paper's equations, pair by pair."""
    xi = np.zeros((3, 3))
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    apart = {(i, j): ((flat[i] - flat[j]) ** 2).sum() for i, j in pairs}
    s = SIGMA * (np.median(list(apart.values())) if relative else 1.0)
    for i, j in pairs:
        if kind == "distance":
            xi[i, j] = ALPHA / 2 * (np.exp(-apart[i, j] / s) if s else 1.0)
        else:
            cosines = {
                h: flat[i] @ flat[h] / np.linalg.norm(flat[i]) / np.linalg.norm(flat[h])
                for h in range(3)
                if h != i
            }
            total = sum(np.exp(SIGMA * cosine) for cosine in cosines.values())
            xi[i, j] = ALPHA * np.exp(SIGMA * cosines[j]) / total
    for i in range(3):
        xi[i, i] = 1 - xi[i].sum()
    return xi


@pytest.mark.parametrize(
    ("kind", "relative"), [("distance", True), ("distance", False), ("cosine", True)]
)
def test_models_are_pulled_towards_what_similar_ones_form(
    federation: Any, by_hand: Any, kind: Any, relative: bool
) -> None:
    method = FedAMP(attention=kind, alpha=ALPHA, sigma=SIGMA, relative=relative, lam=LAM)
    outcome = federation.run(method, rounds=ROUNDS)
    names = sorted(by_hand.PARAMETERS)
    own = dict.fromkeys(federation.names, federation.initial())
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        flat = [np.concatenate([own[c][n].ravel() for n in names]) for c in federation.names]
        xi = attention(flat, kind, relative=relative)
        clouds = [by_hand.combine([*own.values()], row) for row in xi]
        for (name, data), u in zip(federation.data.items(), clouds, strict=True):

            def pulled(gradient: Any, now: Any, u: Any = u) -> Any:
                return {n: g + LAM * (now[n] - u[n]) for n, g in gradient.items()}

            lr = 0.1 * 0.8 ** (t - 1)
            batches = federation.batches(name, t)
            own[name] = by_hand.train(own[name], data, batches, lr, change=pulled)[0]
            by_hand.assert_same(outcome.clients[t][name]["model"], own[name], f"{t} {name}")
            kept = outcome.server[t]["parameters"][name]
            by_hand.assert_same(kept, by_hand.select(own[name], by_hand.PARAMETERS), name)
            personal[name].append(own[name])
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_clients_far_apart_do_not_mix_and_no_weight_is_negative() -> None:
    far = [Tensors({"w": torch.full((3,), value)}) for value in (0.0, 0.1, 1e4)]
    xi = np.array(FedAMP(alpha=1.0, relative=False).weights(far))
    assert xi[2].tolist() == [0.0, 0.0, 1.0]
    same = np.array(FedAMP(alpha=1.0).weights([far[0]] * 6))
    np.testing.assert_allclose(same, (1 - np.eye(6)) / 5, atol=1e-15)


def test_without_a_pull_it_is_single_site_training_bit_by_bit(federation: Any) -> None:
    found, alone = federation.run(FedAMP(lam=0.0)), federation.run(Local())
    for name, state in alone.clients[3].items():
        own = found.clients[3][name]["model"]
        assert all(own[n].equal(t) for n, t in state["model"].items())
    assert FedAMP(lam=0.0).same_as(find_parts(federation.linear())) == "local"


def test_it_sends_parameters_alone_and_takes_two_sites(federation: Any, by_hand: Any) -> None:
    replies = federation.run(FedAMP(), rounds=1).replies("train")
    assert all(reply.keys() == {"parameters", "progress"} for reply in replies)
    assert all(reply["parameters"].keys() == by_hand.PARAMETERS for reply in replies)
    with pytest.raises(ConfigError, match="one site only"):
        FedAMP().check_setup(["A"], find_parts(federation.linear()))
