"""Codecs on real updates of a U-Net: bytes, what is left of the update, and speed.

The updates are those of one site in its third round: of the vessel U-Net of configs/vessel.yaml
(0.2 million parameters), from which the bytes are judged, and of the IOP-FL U-Net (7.8 million),
from which bytes and speed are. They are trained when first needed and kept in a temporary folder.
The data are looked for under $COLLEGIUM_DATA, then in ../shared/data; if there are none, the
networks learn from phantoms, and the first line says so.

Bytes are compared with the entropy of the kept positions and their signs, once with one density for
the whole update ("global") and once with one for each tensor; levels of DAdaQuant with the entropy
of their counts in each tensor. Beside CER + STC is the ratio of plain STC at no lower cosine.
Speed is in bytes of float32 per second of processor time, one thread, medians in turns. The
baseline is STC by torch.topk without any coding: it returns the kept positions in order and the
decoded vector, `encode` returns that vector and the bytes. The subtraction that gives the loss is
in neither.

With --train, FedAvg learns on all sites for 20 rounds with each codec on what the sites send, and
the Dice on test cases stands beside the ratio of all bytes that left the sites in training, running
statistics included, and beside the cosine of the vessel U-Net's update above (takes an hour or
two; --only NAME, as often as wanted, trains with the codecs of these names).

    python benchmarks/codecs.py [--quick] [--base] [--update FILE]
    python benchmarks/codecs.py --train [--rounds N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from common.measuring import in_turns, medians, verdict

from collegium.algorithms.fedavg import FedAvg
from collegium.compression.base import Codec
from collegium.compression.cer import CER
from collegium.compression.dadaquant import DAdaQuant
from collegium.compression.half import Half
from collegium.compression.identity import Identity
from collegium.compression.session.groups import Codecs
from collegium.compression.stc import STC
from collegium.core.tensors import Tensors
from collegium.data.federation import open_federation, open_site
from collegium.data.federation_config import sites_of
from collegium.data.phantoms import make_federation
from collegium.experiment.config.building import task_of
from collegium.experiment.config.experiment import ExperimentConfig, load_config, parse_config
from collegium.models.factory import build_model
from collegium.runtime.federation import initial_model
from collegium.runtime.process import prepare
from collegium.runtime.simulation import simulate
from collegium.training.loop import LocalTraining

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(tempfile.gettempdir()) / "collegium-benchmark-codecs"
SHARES = (1 / 400, 0.0265, 0.16)
GAMMAS = (0.1, 0.3, 1.0, 3.0, 10.0)
LEVELS = (1, 2, 4, 16, 64)
BASE = ("iop_unet", {"out_channels": 2})

BYTES, GLOBAL, ENCODE, DECODE, DECODE_GOLOMB, FASTER = 1.03, 1.05, 250.0, 100.0, 2000.0, 5.0

Measurement = dict[str, Any]


def open_data() -> ExperimentConfig:
    """Return the vessel experiment, or a similar one on phantoms if the data are absent."""
    places = [os.environ.get("COLLEGIUM_DATA"), ROOT.parent / "shared" / "data"]
    for place in places:
        if place and (Path(place) / "vessel").is_dir():
            path = ROOT / "configs" / "vessel.yaml"
            return load_config(path, [f"federation.root={place}"])
    print("no vessel data: the networks learn from phantoms instead")
    federation = make_federation(FOLDER / "phantoms", 3, cases=12, size=128)
    return parse_config(
        {
            "name": "phantoms",
            "federation": str(federation),
            "model": {"name": "unet", "in_channels": 1, "channels": [16, 32, 64, 128]},
            "training": {"optimizer": "adam", "lr": 2e-3, "batch_size": 8, "local_steps": 30},
            "rounds": 3,
            "algorithms": ["fedavg"],
        }
    )


def network_of(config: ExperimentConfig, *, base: bool) -> Callable[[], torch.nn.Module]:
    """Return a builder of the experiment's network, or of the IOP-FL U-Net for the same images."""
    if not base:
        return partial(build_model, config.model.name, **config.model.params)
    name, params = BASE
    return partial(build_model, name, in_channels=config.model.params["in_channels"], **params)


def make_update(*, base: bool, steps: int) -> Tensors:
    """Return the update of the third round at the first site, stored or newly trained."""
    config = open_data()
    file = FOLDER / f"{config.name}-{'base' if base else 'own'}-{steps}.safetensors"
    if not file.exists():
        print(f"training for {file.name} (3 rounds of {steps} steps) ...", flush=True)
        site = sites_of(config.federation)[0]
        data = open_site(config.federation, site, FOLDER / "cache", 0, None).train
        network = network_of(config, base=base)
        training = replace(config.training, local_steps=steps)
        local = LocalTraining(network(), task_of(config), training)
        before = model = initial_model(network, 0)
        for number in range(1, 4):
            before = model
            path = ("client", site, "round", number)
            model, _ = local.fit(model, data, seed=0, path=path, lr=training.lr)
        trainable = {name for name, _ in network().named_parameters()}
        update = (model - before).select(trainable)
        FOLDER.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(dict(update), file)
    return Tensors(safetensors.torch.load_file(file))


def cosine(a: Tensors, b: Tensors) -> float:
    """Return the cosine of two updates."""
    return a.dot(b) / math.sqrt(max(a.dot(a) * b.dot(b), 1e-300))


def entropy(counts: Sequence[int]) -> float:
    """Return the bits of symbols with these counts."""
    total = sum(counts)
    return -sum(count * math.log2(count / total) for count in counts if count)


def bounds(codec: Codec, update: Tensors, decoded: Tensors) -> tuple[float, float]:
    """Return the bytes of the global and of the per-tensor entropy; NaN if there is none."""
    if isinstance(codec, STC):
        kept = [(int(t.count_nonzero()), t.numel()) for t in decoded.values()]
        count, size = map(sum, zip(*kept, strict=True))
        by_tensor = sum(entropy([k, n - k]) for k, n in kept)
        return (entropy([count, size - count]) + count) / 8, (by_tensor + count) / 8
    if isinstance(codec, DAdaQuant):
        bits = 0.0
        for name, tensor in decoded.items():
            scale = max(float(update[name].abs().max()), 1e-300)
            symbols = (tensor.double() * codec.minimum / scale).round().numpy()
            bits += entropy(np.unique(symbols, return_counts=True)[1].tolist())
        return math.nan, bits / 8
    return math.nan, math.nan


def measure(codec: Codec, update: Tensors) -> Measurement:
    """Return the bytes of a codec, their bounds, and the cosine of decoded and true update."""
    data, decoded = codec.encode(update, torch.Generator().manual_seed(0), {})
    received = codec.decode(data, update)
    assert all(torch.equal(received[name], decoded[name]) for name in update)
    globally, by_tensor = bounds(codec, update, decoded)
    return {
        "bytes": len(data),
        "ratio": 4 * update.numel() / len(data),
        "global": len(data) / globally,
        "tensor": len(data) / by_tensor,
        "cosine": cosine(update, decoded),
    }


def speeds(
    codecs: Mapping[str, Codec], update: Tensors, repetitions: int
) -> dict[str, Measurement]:
    """Return MB/s of encoding and decoding."""
    rng, size = torch.Generator().manual_seed(0), 4 * update.numel() / 1e6
    works: dict[str, Callable[[], object]] = {}
    for name, codec in codecs.items():
        works[f"{name}|encode"] = partial(codec.encode, update, rng, {})
        works[f"{name}|decode"] = partial(codec.decode, codec.encode(update, rng, {}).data, update)
    seconds = medians(in_turns(works, repetitions, time.process_time))
    return {
        name: {side: size / seconds[f"{name}|{side}"] for side in ("encode", "decode")}
        for name in codecs
    }


def by_topk(update: Tensors, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions that STC by torch.topk keeps, and the decoded vector."""
    flat = torch.cat([tensor.flatten() for tensor in update.values()])
    largest, places = torch.topk(flat.abs(), max(1, round(p * len(flat))), sorted=False)
    places = places.sort().values
    kept = torch.zeros_like(flat)
    kept[places] = torch.sign(flat[places]) * largest.mean()
    return places, kept


def against_topk(update: Tensors, repetitions: int) -> dict[float, float]:
    """Return how many times as fast `encode` is, by share."""
    rng = torch.Generator()
    found = {}
    for p in SHARES:
        codec = STC(p=p, coding="golomb")
        works: dict[str, Callable[[], object]] = {
            "ours": partial(codec.encode, update, rng, {}),
            "topk": partial(by_topk, update, p),
        }
        seconds = medians(in_turns(works, repetitions, time.process_time))
        found[p] = seconds["topk"] / seconds["ours"]
    return found


def show(name: str, row: Measurement, extra: str = "") -> None:
    """Print a row of the table."""
    parts = [f"  {name:<30} {row['bytes']:>10,} B {row['ratio']:>8.1f}x  cos {row['cosine']:.3f}"]
    bounds = {key: row[key] for key in ("global", "tensor") if not math.isnan(row[key])}
    parts += [f"{value:.3f} of {key}" for key, value in bounds.items()]
    if "encode" in row:
        parts.append(f"enc {row['encode']:,.0f} dec {row['decode']:,.0f} MB/s")
    print("  ".join([*parts, extra]).rstrip(), flush=True)


def named_codecs() -> dict[str, Codec]:
    """Return the codecs of the first table."""
    codecs: dict[str, Codec] = {"identity": Identity(), "half": Half()}
    for p in SHARES:
        for coding in ("golomb", "adaptive", "range"):
            codecs[f"stc p={p:g} {coding}"] = STC(p=p, coding=coding)
    return codecs | {f"dadaquant q={q}": DAdaQuant(minimum=q) for q in LEVELS}


def compare(title: str, update: Tensors, repetitions: int, points: int) -> dict[str, Measurement]:
    """Print and return the measurements of every codec on an update.

    Args:
        title: name of the network.
        update: the update.
        repetitions: for the speeds; 0: none are measured.
        points: shares at which plain STC is measured, to compare CER + STC with.
    """
    print(f"\n{title}: {update.numel():,} numbers in {len(update)} tensors")
    codecs = named_codecs()
    fast = speeds(codecs, update, repetitions) if repetitions else {}
    rows = {name: measure(codec, update) | fast.get(name, {}) for name, codec in codecs.items()}
    for name, row in rows.items():
        show(name, row)
    curve = [measure(STC(p=float(p)), update) for p in np.geomspace(2e-4, 0.5, points)]
    for gamma in GAMMAS:
        show(f"cer gamma={gamma:g}", measure(CER(gamma=gamma, values="bfloat16"), update))
    for p in SHARES[1:]:
        for gamma in GAMMAS:
            row = measure(CER(gamma=gamma, then="stc", p=p), update)
            equal = [other["ratio"] for other in curve if other["cosine"] >= row["cosine"]]
            plain = f"plain stc of no lower cosine: {max(equal):.0f}x" if equal else ""
            show(f"cer gamma={gamma:g} + stc p={p:g}", row, plain)
    return rows


def judge(
    rows: Sequence[dict[str, Measurement]], fast: dict[str, Measurement], faster: dict[float, float]
) -> bool:
    """Print the figures beside their targets; return whether all are met."""
    kinds = {"range": ("range", "q="), "golomb": ("golomb", "adaptive")}

    def all_of(table: dict[str, Measurement], words: Sequence[str], key: str) -> list[float]:
        return [row[key] for name, row in table.items() if any(word in name for word in words)]

    def worst(key: str, kind: str) -> float:
        return max(value for table in rows for value in all_of(table, kinds[kind], key))

    slowest = min(all_of(fast, [word for kind in kinds.values() for word in kind], "encode"))
    good = [
        verdict("codecs, range coder, bytes of the entropy of each tensor",
                worst("tensor", "range"), BYTES, least=False),
        verdict("codecs, Golomb, bytes of the global entropy",
                worst("global", "golomb"), GLOBAL, least=False),
        verdict("codecs, encoding, MB/s", slowest, ENCODE, least=True),
        verdict("codecs, decoding by the range coder, MB/s",
                min(all_of(fast, kinds["range"], "decode")), DECODE, least=True),
        verdict("codecs, decoding Golomb, MB/s",
                min(all_of(fast, ["golomb"], "decode")), DECODE_GOLOMB, least=True),
        verdict("codecs, STC, times as fast as torch.topk",
                min(faster.values()), FASTER, least=True),
    ]  # fmt: skip
    return all(good)


def codecs_to_train(rounds: int) -> dict[str, Codec | None]:
    """Return the codecs with which --train trains; the first is the reference."""
    codecs: dict[str, Codec | None] = {"none": None, "half": Half()}
    codecs |= {f"stc p={p:g}": STC(p=p) for p in (*SHARES, 0.05)}
    codecs["dadaquant"] = DAdaQuant(patience=max(1, rounds // 10))
    codecs |= {f"dadaquant q={q}": DAdaQuant(minimum=q, adapt="none") for q in (1, 4)}
    codecs |= {f"cer gamma={g:g}": CER(gamma=g, values="bfloat16") for g in (1.0, 3.0)}
    for p in SHARES[1:]:
        for gamma in (0.3, 1.0):
            codecs[f"cer gamma={gamma:g} + stc p={p:g}"] = CER(gamma=gamma, then="stc", p=p)
    return codecs


def train(rounds: int, only: Sequence[str]) -> None:
    """Print the Dice of FedAvg on test cases beside the bytes that left the sites."""
    update = make_update(base=False, steps=30)
    config = open_data()
    sites = open_federation(config.federation, FOLDER / "cache", 0, FOLDER / "splits")
    network, task = network_of(config, base=False), task_of(config)
    raw = 0
    print(f"FedAvg on {', '.join(sorted(sites))}, {rounds} rounds")
    for name, codec in codecs_to_train(rounds).items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        found = simulate(
            FedAvg(),
            list(sites.values()),
            network,
            task,
            rounds=rounds,
            training=config.training,
            evaluate_every=max(1, rounds // 4),
            codecs=Codecs(up=codec),
        )
        sent = sum(sum(record.bytes_up.values()) for record in found.records)
        raw = raw or (0 if codec else sent)
        arrived = measure(codec, update)["cosine"] if codec else 1.0
        dice = [
            statistics.mean([r[task.metric] for r in kinds["global"] if r[task.metric] is not None])
            for _, kinds in sorted(found.scores.items())
        ]
        print(
            f"  {name:<30} {sent:>12,} B up"
            + (f" {raw / sent:>8.1f}x" if raw else "")
            + f"  cos {arrived:.3f}  {task.metric} {statistics.mean(dice):.4f}  at the sites"
            f" {' '.join(f'{value:.3f}' for value in dice)}  "
            f"({time.perf_counter() - start:.0f} s)",
            flush=True,
        )


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and repetitions")
    parser.add_argument("--base", action="store_true", help="only the larger U-Net")
    parser.add_argument("--update", type=Path, help="a safetensors file to use instead")
    parser.add_argument("--train", action="store_true", help="Dice after training with each codec")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of --train")
    parser.add_argument("--only", action="append", default=[], help="a codec of --train")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    prepare(threads=1)
    if options.train:
        train(options.rounds, options.only)
        return 0
    repetitions, points = (3, 12) if options.quick else (9, 48)
    tables = []
    if options.update:
        large = Tensors(safetensors.torch.load_file(options.update))
        large = large.select([name for name, t in large.items() if t.is_floating_point()])
    else:
        if not options.base:
            own = make_update(base=False, steps=5 if options.quick else 30)
            tables.append(compare("vessel U-Net", own, 0, points))
        large = make_update(base=True, steps=2 if options.quick else 10)
    fast = compare(str(options.update or "IOP-FL U-Net"), large, repetitions, points)
    faster = against_topk(large, repetitions)
    print("\nSTC against torch.topk: " + ", ".join(f"p={p:g} {x:.1f}" for p, x in faster.items()))
    return 0 if judge([*tables, fast], fast, faster) else 1


if __name__ == "__main__":
    sys.exit(main())
