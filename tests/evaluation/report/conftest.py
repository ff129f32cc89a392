"""A run as an experiment leaves it, small, with every kind of content that a report can show."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.tensors import Tensors
from collegium.evaluation.report.overlays import (
    draw_layers,
    draw_overlay,
    encode_for_web,
    prepare_case,
)
from collegium.evaluation.results import results_frame, write_results
from collegium.runtime.ledger import Ledger
from collegium.runtime.state import Store

SITES = ("Basel", "Kyoto", "Leeds", "<b>Quito")
METHODS = {
    "local": ("personal",),
    "fedavg": ("global",),
    "fedbn": ("personal",),
    "ditto": ("global", "personal"),
    "my own": ("global",),
}
SEEDS = (0, 1)
ROUNDS = 12
PATIENTS = (9, 8, 7, 4)
MATRIX = [[0.0, 1.0, 4.0, 9.0], [1.0, 0.0, 3.0, 8.0], [4.0, 3.0, 0.0, 5.0], [9.0, 8.0, 5.0, 0.0]]
LAYERS = ("down.0", "down.1", "up.0")


@pytest.fixture(scope="session")
def make_run():
    """A function that writes a run of 5 algorithms on 4 sites with 2 seeds into a folder."""

    def make(folder: Path, *, overlays: bool = True, outside: bool = False) -> Path:
        rng = np.random.default_rng(7)
        rows = list(_inside(rng))
        if outside:
            rows += _outside(rng)
            _accounts(folder)
            _states(folder)
            (folder / "assessment").mkdir()
            (folder / "assessment" / "assessment.json").write_text(json.dumps(_assessment()))
        write_results(results_frame(rows), folder)
        config = {
            "name": "vessels",
            "algorithms": [{"name": name, "label": name} for name in METHODS],
            "seeds": list(SEEDS),
            "rounds": ROUNDS,
            "model": {"name": "unet", "channels": [16, 32, 64]},
            "output": "runs/vessels",
        }
        versions = {"python": "3.11.9", "torch": "2.9.1", "collegium": "0.1.0"}
        (folder / "run.json").write_text(json.dumps({"config": config, "versions": versions}))
        if overlays:
            _overlays(folder, rng)
        if overlays and outside:
            _overlays_outside(folder, rng)
        _ledgers(folder)
        return folder

    return make


def _inside(rng):
    gain = {"local": 0.0, "fedavg": 0.03, "fedbn": 0.05, "ditto": 0.04, "my own": -0.06}
    for algorithm, models in METHODS.items():
        for seed in SEEDS:
            for place, site in enumerate(SITES):
                base = 0.80 - 0.05 * place + (gain[algorithm] if place != 2 else 0.0)
                about = {
                    "experiment": "vessels",
                    "algorithm": algorithm,
                    "seed": seed,
                    "site": site,
                }
                yield from _rounds(about, models, base, rng)
                yield from _cases(about, models, base, PATIENTS[place], rng)


def _rounds(about, models, base, rng):
    sent = 0 if about["algorithm"] == "local" else 1_900_000
    for number in range(1, ROUNDS + 1):
        loss = 0.9 * np.exp(-number / 5) + 0.12 + rng.normal(0, 0.01)
        yield dict(**about, round=number, split="train", metric="loss", value=loss,
                  bytes_up=sent, bytes_down=sent, seconds=3.2)  # fmt: skip
        for model in models:
            value = base * (1 - np.exp(-number / 3)) + rng.normal(0, 0.008)
            yield dict(**about, round=number, split="val", model=model, metric="dice", value=value)


def _cases(about, models, base, patients, rng):
    for model in models:
        for patient in range(1, patients + 1):
            hard = 0.02 * np.sin(patient) + rng.normal(0, 0.012)
            names = {"case": f"c{patient:03}", "patient": f"p{patient:03}"}
            about_case = {**about, **names, "round": ROUNDS, "split": "test", "model": model}
            yield dict(**about_case, metric="dice", value=base + hard)
            undefined = patient == 2 and about["site"] == "Kyoto"
            distance = None if undefined else 4.0 - 2 * base + rng.normal(0, 0.2)
            yield dict(**about_case, metric="hd95", value=distance, unit="mm")


def _outside(rng):
    """Oslo took no part; routing gains 0.08 for it and Tent nothing."""
    for adapter, base in (("none", 0.60), ("tent", 0.60), ("routing", 0.68)):
        for seed in SEEDS:
            for patient in range(1, 9):
                yield {
                    "experiment": "vessels",
                    "algorithm": "ditto",
                    "seed": seed,
                    "round": ROUNDS,
                    "site": "Oslo",
                    "case": f"outside-c{patient}",
                    "patient": f"outside-p{patient}",
                    "split": "outside",
                    "model": adapter,
                    "metric": "dice",
                    "value": base + 0.02 * np.sin(patient) + rng.normal(0, 0.004),
                }


def _accounts(folder):
    for seed in SEEDS:
        for adapter in ("none", "tent", "routing"):
            place = folder / "ditto" / f"seed-{seed}" / "outside" / "Oslo" / adapter
            place.mkdir(parents=True)
            (place / "account.json").write_text(json.dumps(account(seed, adapter)))


def _states(folder):
    """FedBN goes by distances, the same for both seeds, and Ditto by another graph for each."""
    sites = list(SITES)
    distance = {
        "sites": sites, "matrix": [[10 * value for value in row] for row in MATRIX],
        "most_distant": sites[3], "omega": {**dict.fromkeys(sites[:3], 1.0), sites[3]: 0.25},
    }  # fmt: skip
    for seed in SEEDS:
        matrix = [[value / (seed + 1) for value in row] for row in MATRIX]
        graph = {"clients": sites, "distances": matrix, "edges": [sites[:2], sites[2:]]}
        Store(folder / "fedbn" / f"seed-{seed}" / "server").save("000012", {"distance": distance})
        Store(folder / "ditto" / f"seed-{seed}" / "server").save("000012", {"graph": graph})


def account(seed: int, adapter: str) -> dict[str, Any]:
    sources = ["global", "Basel", "<b>Quito"]
    values = [[0.2 + 0.1 * seed, 0.5, 0.3 - 0.1 * seed]] * len(LAYERS)
    losses = [{"step": k, "total": 2.0 - 0.1 * k, "entropy": 1.0} for k in range(12)]
    routed = adapter == "routing"
    return {
        "adapter": {"name": adapter, "label": adapter},
        "algorithm": "ditto",
        "seed": seed,
        "site": "Oslo",
        "sources": sources if routed else ["global"],
        "cases": 8,
        "steps": 12 if routed else 0,
        "seconds": 30.0 + 10 * seed,
        "losses": losses if routed else [],
        "chosen": 11 if routed else None,
        "coefficients": {"layers": list(LAYERS), "sources": sources, "values": values}
        if routed
        else None,
        "notes": ["The statistics are those of <i>Oslo."] if adapter == "tent" else [],
    }


def _assessment() -> dict[str, Any]:
    sites = list(SITES)
    halves = [sites[:2], sites[2:]]
    geometry = {
        "key": "metadata",
        "made_of": "channel 1 and vessel",
        "sites": sites,
        "matrix": MATRIX,
        "most_distant": "<b>Quito",
        "stability": dict.fromkeys(sites, 0.25),
        "edges": [["Basel", "Kyoto"], ["Kyoto", "Leeds"], ["Leeds", "<b>Quito"]],
        "neighbours": 1,
        "clusters": {"recommended": halves, "printed": halves},
    }
    return {
        "sites": sites,
        "findings": {"geometries": [geometry], "proxy": {"sites": sites, "matrix": MATRIX}},
        "verdict": {"level": "differ", "headline": "The sites differ.", "why": "p = 0.001."},
    }


def _disc(across: float, radius: float) -> Any:
    down, right = np.mgrid[:160, :160]
    return (down - 80) ** 2 + (right - 80 - across) ** 2 < radius**2


def _draw_cases(folder, about, image, shift, start=""):
    """Draw a case of each rank, and yield its entry of the index."""
    for number, rank in enumerate(("best", "median", "worst", "common")):
        guess = _disc(6 * number + shift, 38 - 4 * number)
        planes = prepare_case(image[None], _disc(0, 40) * 1, guess * 1, _disc(0, 76))
        stem = f"{(*SITES, 'Oslo').index(about['site'])}-{about['model']}-{rank}"
        draw_overlay(planes).save(folder / f"{stem}.png")
        layers = {}
        for name, layer in draw_layers(planes).items():
            content, kind = encode_for_web(layer)
            layers[name] = f"{stem}-{name}.{kind}"
            (folder / layers[name]).write_bytes(content)
        yield about | {
            "rank": rank, "case": f"{start}c00{number + 1}", "metric": "dice",
            "value": 0.9 - 0.1 * number, "file": f"{stem}.png", "layers": layers,
        }  # fmt: skip


def _overlays_outside(folder, rng):
    image = _disc(0, 40) + rng.normal(0, 0.4, (160, 160))
    for shift, adapter in enumerate(("none", "tent", "routing")):
        place = folder / "ditto" / "seed-0" / "outside" / "Oslo" / adapter / "overlays"
        place.mkdir(parents=True)
        about = {"site": "Oslo", "model": adapter}
        index = list(_draw_cases(place, about, image, 3 * shift, "outside-"))
        (place / "index.json").write_text(json.dumps(index))


def _overlays(folder, rng):
    images = {site: _disc(0, 40) + rng.normal(0, 0.4, (160, 160)) for site in SITES}
    for shift, (algorithm, models) in enumerate(METHODS.items()):
        job = folder / algorithm / "seed-0" / "overlays"
        job.mkdir(parents=True)
        index = []
        for site in SITES:
            for model in models:
                about = {"site": site, "model": model}
                index += _draw_cases(job, about, images[site], shift)
        (job / "index.json").write_text(json.dumps(index))


def _ledgers(folder):
    """Two messages a seed and site; from one ledger the first line was removed."""
    for algorithm in METHODS:
        for seed in SEEDS:
            for site in SITES:
                path = folder / algorithm / f"seed-{seed}" / "clients" / site / "ledger.jsonl"
                path.parent.mkdir(parents=True)
                ledger = Ledger(path)
                for number in (1, 2) if algorithm != "local" else ():
                    parts = {"model": Tensors({"weight": torch.zeros(2500)}), "num_examples": 12}
                    ledger.append(parts, bytes(10_100), round=number, exchange=0, method="train")
    broken = folder / "ditto" / "seed-1" / "clients" / "Leeds" / "ledger.jsonl"
    broken.write_text(broken.read_text().splitlines(keepends=True)[1])
