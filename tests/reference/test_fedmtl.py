from typing import Any

import numpy as np
import pytest

from collegium.algorithms.fedmtl import FedMTL
from collegium.algorithms.local import Local
from collegium.core.model_parts import find_parts
from collegium.errors import ConfigError

ROUNDS = 3
LAM = 0.8
CENTRED = np.eye(3) - np.ones((3, 3)) / 3


def penalty(columns: Any, kind: str) -> Any:
    """The penalty of W, one column for each client, as written down; right for complex numbers."""
    if kind == "mean":
        return LAM / 2 * np.trace(columns @ CENTRED @ CENTRED @ columns.T)
    omega = np.sqrt((np.ones((3, 3)) - np.ones((3, 3)) / 3)[0, 0] ** 2)
    rows, digits = len(columns), int(np.log10(len(columns)) + 1) + 1
    assert (rows, digits) == (13, 3)
    return 10.0**-digits * ((columns**2).sum() + ((columns * omega).sum(1) ** 2).sum())


@pytest.mark.parametrize("kind", ["mean", "released"])
def test_each_model_is_trained_with_the_penalty_of_all(
    federation: Any, by_hand: Any, kind: Any
) -> None:
    outcome = federation.run(FedMTL(penalty=kind, lam=LAM), rounds=ROUNDS)
    names = sorted(by_hand.PARAMETERS)
    own = dict.fromkeys(federation.names, federation.initial())
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = {}
        for place, (name, data) in enumerate(federation.data.items()):
            models = [own[c] for c in federation.names]

            def penalised(gradient: Any, now: Any, place: int = place, models: Any = models) -> Any:
                def of(live: Any) -> Any:
                    models[place] = live
                    flat = [np.concatenate([m[n].ravel() for n in names]) for m in models]
                    return penalty(np.stack(flat, axis=1), kind)

                slopes = by_hand.slopes(of, now, by_hand.PARAMETERS)
                return {n: g + slopes[n] for n, g in gradient.items()}

            lr = 0.1 * 0.8 ** (t - 1)
            batches = federation.batches(name, t)
            trained[name] = by_hand.train(own[name], data, batches, lr, change=penalised)[0]
            by_hand.assert_same(outcome.clients[t][name]["model"], trained[name], f"{t} {name}")
            personal[name].append(trained[name])
        own = trained
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


@pytest.mark.parametrize("method", [FedMTL(penalty="detached"), FedMTL(lam=0.0)])
def test_without_a_gradient_of_the_penalty_it_is_single_site_training(
    federation: Any, method: FedMTL
) -> None:
    found, alone = federation.run(method, rounds=2), federation.run(Local(), rounds=2)
    for name, state in alone.clients[2].items():
        own = found.clients[2][name]["model"]
        assert all(own[n].equal(t) for n, t in state["model"].items())
    assert method.same_as(find_parts(federation.linear())) == "local"


def test_it_sends_parameters_alone_and_takes_two_sites(federation: Any, by_hand: Any) -> None:
    replies = federation.run(FedMTL(), rounds=1).replies("train")
    assert all(reply.keys() == {"parameters", "progress"} for reply in replies)
    assert all(reply["parameters"].keys() == by_hand.PARAMETERS for reply in replies)
    with pytest.raises(ConfigError, match="one site only"):
        FedMTL().check_setup(["A"], find_parts(federation.linear()))
