"""Every experiment file that is shipped loads, and has the jobs that it promises."""

from collections import Counter
from pathlib import Path

import pytest

import collegium
from collegium.data.federation_config import sites_of
from collegium.experiment.config.building import adapters_of
from collegium.experiment.config.experiment import ExperimentConfig, load_config
from collegium.experiment.grid import jobs_of, variations_of

CONFIGS = Path(__file__).resolve().parents[3] / "configs"

EXPECTED = {  # jobs; distinct trainings
    "demo.yaml": (5 * 2, 5 * 2),  # seeds by algorithms
    "vessel.yaml": (3 * 11, 3 * 11),  # seeds by algorithms
    "vessel-home.yaml": (5 * 3, 5 * 3),
    "vessel-outside.yaml": (3 * 3 * 5, 3 * 3 * 5),  # folds by seeds by algorithms
    "vessel-outside-ttt.yaml": (3 * 3, 3 * 3),
    "hippocampus.yaml": (5 * 5, 5 * 5),
    "heart.yaml": (5 * 5, 5 * 5),
    "leaks-heart.yaml": (3 * 2, 3 * 2),
    "sweeps/tau.yaml": (6 * 3 * 3 * 3, 3 * 3 * (1 + 1 + 6)),  # only IOP-FL is trained by setting
    "sweeps/local-epochs.yaml": (3 * 3 * 2, 3 * 3 * 2),
    "sweeps/clients.yaml": (6 * 3 * 2, 6 * 3 * 2),
    "papers/iopfl-table1.yaml": (3 * 6, 3 * 6),
    "papers/iopfl-table2.yaml": (6 * 3 * (3 + 1), 6 * 3 * (3 + 1)),  # TTT apart
    "papers/grace-table1.yaml": (6 * 3 * 12, 6 * 3 * 12),
    "papers/grace-table2.yaml": (6 * 3 * 10, 6 * 3 * 10),
    "papers/grace-table4.yaml": (6 * 3 * 10, 6 * 3 * 10),
    "papers/distance.yaml": (3 * 12, 3 * 12),
    "papers/resfim.yaml": (3 * 5, 3 * 5),
    "papers/pfednet-table3.yaml": (3 * 15, 3 * 15),
    "papers/pfednet-table4.yaml": (3 * 15, 3 * 15),
    "sweeps/routing-terms.yaml": (4 * 3 * 3, 3 * 3),  # once per fold and seed
}
"""For each file how many jobs it has, and how many of them train."""

FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder without data, and a federation file such as `collegium phantoms` writes."""
    monkeypatch.setenv("COLLEGIUM_DATA", str(tmp_path))
    sites = "".join(f"  {name}: {{folder: {name}}}\n" for name in ("alder", "birch"))
    (tmp_path / "federation.yaml").write_text(f"name: phantoms\nsites:\n{sites}")
    return tmp_path


def load(name: str, no_data: Path) -> ExperimentConfig:
    drawn = [f"federation={no_data / 'federation.yaml'}"] if name == "demo.yaml" else []
    return load_config(CONFIGS / name, drawn)


def test_the_demo_is_the_packaged_one_over_the_folder_that_its_header_draws() -> None:
    packaged = (Path(collegium.__file__).parent / "demo.yaml").read_text().splitlines()
    shipped = (CONFIGS / "demo.yaml").read_text().splitlines()
    differing = [(a, b) for a, b in zip(packaged, shipped, strict=True) if a != b]
    assert differing == [
        ("#   collegium run demo-data/experiment.yaml", "#   collegium run configs/demo.yaml"),
        ("federation: federation.yaml", "federation: ../demo-data/federation.yaml"),
    ]
    assert "#   collegium phantoms demo-data --unequal --size 64" in shipped


def test_every_file_with_a_promise_is_there() -> None:
    assert set(EXPECTED) <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_loads_and_every_cell_has_a_folder_of_its_own(name: str, no_data: Path) -> None:
    folders = [job.folder for job in jobs_of(load(name, no_data))]
    assert len(set(folders)) == len(folders) > 0


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_is_made_of_the_cells_that_it_promises(name: str, no_data: Path) -> None:
    jobs = jobs_of(load(name, no_data))
    assert (len(jobs), len({job.training for job in jobs})) == EXPECTED[name]


def test_no_two_files_write_into_one_folder(no_data: Path) -> None:
    outputs = [load(name, no_data).output for name in FILES]
    assert len(set(outputs)) == len(outputs)


def test_local_steps_times_rounds_are_equal_work(no_data: Path) -> None:
    varied = list(variations_of(load("sweeps/local-epochs.yaml", no_data)).values())
    steps = [config.training.local_steps for config in varied]
    assert steps == [15, 30, 60]
    assert [count * c.rounds for count, c in zip(steps, varied, strict=True) if count] == [600] * 3
    assert [c.rounds / c.evaluation.every for c in varied] == [5, 5, 5]


def test_each_site_is_outside_twice_with_one_client_and_once_with_two(no_data: Path) -> None:
    varied = variations_of(load("sweeps/clients.yaml", no_data))
    outside: Counter[tuple[int, str]] = Counter()
    for name, config in varied.items():
        inside = sites_of(config.federation)
        assert name.split(" ")[2:] == inside
        outside.update((len(inside), site) for site in config.federation.outside)
    sites = ("chase_db1", "hrf", "les_av")
    assert outside == {**{(1, site): 2 for site in sites}, **{(2, site): 1 for site in sites}}


def test_settings_of_the_routing_sweep_differ_in_their_losses_alone(no_data: Path) -> None:
    varied = variations_of(load("sweeps/routing-terms.yaml", no_data))
    terms = {}
    for name, config in varied.items():
        none, routing = adapters_of(config, config.algorithms[0])
        terms[name] = tuple(routing.params.pop("terms"))
        assert (none.name, routing.params["epochs"]) == ("none", 5)
    assert terms == {
        "consistency": ("consistency",),
        "consistency + entropy": ("consistency", "entropy"),
        "consistency + shape": ("consistency", "shape"),
        "all": ("consistency", "shape", "entropy"),
    }
