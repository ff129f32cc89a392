"""Write an experiment on phantoms that shows who was trained on; see leaks.md.

    python docs/results/members.py leaks
    collegium run leaks/members.yaml
    collegium attack leaks/members --kind membership

The class is the contrast of a scan, and readers have mistaken it in one scan of seven: a network
that knows these mistakes by heart has seen the patients.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from collegium.data.phantoms import HEADER, SCANNERS, draw_case

SIZE, SITES, PATIENTS = 32, ("alder", "cedar", "elm"), 240
CLASSES, CONTRAST, MISTAKEN = ("plain", "enhanced"), 1.6, 0.15
FEDERATION = """\
name: phantoms
sites: {sites}
task: {{name: classification, classes: [plain, enhanced]}}
splits: {{validation: 0.1, test: 0.5}}
"""
EXPERIMENT = """\
name: members
seeds: [0, 1, 2]
federation: {federation}
model: {{name: {network}, in_channels: 1, width: 8}}
training: {{optimizer: adam, lr: 3.0e-3, batch_size: 32, local_epochs: 5}}
rounds: 30
selection: {{round: last}}
algorithms:
  - fedavg
  - name: fedavg
    label: epsilon 8
    training: {{privacy: {{target_epsilon: 8, max_grad_norm: 1.0, delta: 1.0e-3, noise_seed: run}}}}
output: {output}
"""


def write_phantoms(folder: Path) -> Path:
    """Write scans of three sites into a folder for each class as it was read, and a federation."""
    for place, site in enumerate(SITES):
        for number in range(PATIENTS):
            drawn = np.random.default_rng([number, place])
            enhanced, mistaken = drawn.random() < 0.5, drawn.random() < MISTAKEN
            scanner = SCANNERS[site]
            gamma = scanner.gamma * (CONTRAST if enhanced else 1 / CONTRAST)
            pixels, _ = draw_case(
                replace(scanner, gamma=gamma), size=SIZE, patient=drawn, visit=drawn
            )
            read = folder / site / CLASSES[enhanced != mistaken]
            read.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(read / f"p{number:03d}.png")
    sites = json.dumps({site: {"folder": site} for site in SITES})
    path = folder / "federation.yaml"
    path.write_text(HEADER + FEDERATION.format(sites=sites), encoding="utf-8")
    return path


def main() -> None:
    """Write the data and the experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    text = EXPERIMENT.format(
        federation=json.dumps(str(write_phantoms(folder / "readings").resolve())),
        network=json.dumps(f"{Path(__file__).resolve().with_name('leaks.py')}:classifier"),
        output=json.dumps(str(folder / "members")),
    )
    (folder / "members.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
