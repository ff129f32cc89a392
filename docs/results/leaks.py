"""Write experiments on phantoms whose messages `collegium attack` inverts; see leaks.md.

    python docs/results/leaks.py leaks
    collegium attack leaks/classification.yaml --label inferred
    collegium attack leaks/segmentation.yaml --defences none
    collegium attack leaks/shared.yaml --kind shared

The networks are the plainest ones, whose gradients tell most: without normalisation or pooling.
"""

import argparse
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from collegium import FedAvg, Message, Tensors, handler, settings
from collegium.core.payloads import Features
from collegium.data.phantoms import HEADER, SCANNERS, draw_case, make_federation

SIZE = 32
CLASSES = ("first", "second")
TEMPLATE = """\
name: leaks
federation: {federation}
model: {{name: {network}, in_channels: 1}}
training: {{optimizer: sgd, lr: 0.1, batch_size: 1, local_steps: 1}}
algorithms: [{algorithms}]
rounds: 1
output: {output}
"""
SHARING = """
  feddg, {name: feddg, label: feddg-0.1, window: 0.1},
  {name: feddg, label: feddg-whole, window: 0.49},
  resfim, {name: resfim, label: resfim-0.1, window: 0.1},
  {name: resfim, label: resfim-whole, window: 0.49},
  harmofl, {name: harmofl, label: harmofl-3, radius: 3},
  {name: harmofl, label: harmofl-whole, radius: 15},
  {name: distance, kind: embedding}, pfednet,
  {name: pfednet, label: pfednet-moments, sketch: second_moment},
  {name: "HERE:SendsFeatures", label: features}"""


@settings
class SendsFeatures(FedAvg):
    """FedAvg whose sites also send what enters the head, which no method of Collegium does."""

    sends: ClassVar = {
        "maps": Features(holds="latent", by_case=True),
        "means": Features(holds="latent", by_case=True),
    }
    neutral = None

    @handler
    def train(self, client, request):  # type: ignore[no-untyped-def]
        """Send, beside the model, the features of each image, and their means over space."""
        reply = super().train(client, request)
        maps = torch.cat(client.collect(reply["model"], lambda batch, out: out.features))
        means = maps.flatten(2).mean(2)
        return Message.of(
            **reply,
            maps=Tensors({"maps": maps}),
            means=Tensors({"means": means}),
        )


def classifier(in_channels: int = 1, width: int = 16) -> nn.Sequential:
    """Return a network of three convolutions with ReLU and a linear layer, for 32 x 32 pixels."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (SIZE // 4) ** 2, len(CLASSES)),
    )


def unet(in_channels: int = 1, norm: str | None = None) -> nn.Module:
    """Return MONAI's U-Net of the demo, with ReLU and, unless it is named, no normalisation."""
    from monai.networks.nets.unet import UNet

    return UNet(2, in_channels, 2, (8, 16, 32), (2, 2), num_res_units=2, act="relu", norm=norm)  # type: ignore[arg-type]


def write_classification(folder: Path) -> Path:
    """Write phantoms of two sites into a folder for each class, drawn by lot, and a federation."""
    for site in ("alder", "birch"):
        for number in range(12):
            rngs = (np.random.default_rng([number, visit, len(site)]) for visit in range(2))
            patient, visit = rngs
            pixels, _ = draw_case(SCANNERS[site], size=SIZE, patient=patient, visit=visit)
            place = folder / site / CLASSES[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"p{number:02d}.png")
    sites = json.dumps({site: {"folder": site} for site in ("alder", "birch")})
    task = json.dumps({"name": "classification", "classes": [*CLASSES]})
    path = folder / "federation.yaml"
    path.write_text(f"{HEADER}name: phantoms\nsites: {sites}\ntask: {task}\n", encoding="utf-8")
    return path


def write_scans(folder: Path) -> Path:
    """Write phantoms of four sites with masks, and a federation that does not flip them."""
    path = make_federation(folder, 4, size=SIZE)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("flips: true", "flips: false"), encoding="utf-8")
    return path


def main() -> None:
    """Write the data and the experiments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    here = Path(__file__).resolve()
    for name, federation, network, algorithms in (
        ("classification", write_classification(folder / "images"), "classifier", "fedavg, fedper"),
        ("segmentation", make_federation(folder / "masks", 2, size=SIZE), "unet", "fedavg"),
        ("shared", write_scans(folder / "scans"), "unet", SHARING),
    ):
        text = TEMPLATE.format(
            federation=json.dumps(str(federation.resolve())),
            network=json.dumps(f"{here}:{network}"),
            algorithms=algorithms.replace("HERE", str(here)),
            output=json.dumps(str(folder / name)),
        )
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
