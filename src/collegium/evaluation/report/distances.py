"""The distances between sites that methods used, read from the states of a run's servers.

Distance-aware methods keep distances with the weights or clusters that follow, pFedNet the graph of
similar sites.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collegium.errors import DataError
from collegium.evaluation.results import job_folders
from collegium.evaluation.scores import method_name, position
from collegium.heterogeneity.distances import checked
from collegium.runtime.state import Store

_KINDS = (
    ("distance", "sites", "matrix", "descriptions of their data"),
    ("graph", "clients", "distances", "sketches of their data"),
)
"""A key of a server's state, the keys of sites and distances there, and what these are made of."""


@dataclass(frozen=True)
class SiteDistances:
    """The distances between sites as one method measured them, and what followed from them.

    Attributes:
        made_of: What the distances are made of, for a reader.
        sites: In the order of the matrix.
        matrix: Distances, (N, N).
        edges: The pairs of sites that the method ties to each other.
        most_distant: The site whose distances sum to the most; empty if nothing follows from it.
        factors: By site what its weight is multiplied by; empty if weights stay as they are.
        clusters: Those that train apart; empty without.
    """

    made_of: str
    sites: Sequence[str]
    matrix: Sequence[Sequence[float]]
    edges: Sequence[Sequence[str]] = ()
    most_distant: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    clusters: Sequence[Sequence[str]] = ()

    @property
    def geometry(self) -> dict[str, Any]:
        """The same as `collegium.evaluation.report.assessment.network_svg` takes it."""
        return vars(self) | {"clusters": {"recommended": self.clusters} if self.clusters else {}}


@dataclass
class MethodDistances:
    """The distances in one or more jobs of a method, which have the same.

    Attributes:
        fold: The fold in words, such as "without Basel"; empty without folds.
        seeds: The seeds.
        distances: Those that the server keeps.
    """

    fold: str
    seeds: list[int]
    distances: list[SiteDistances]

    @property
    def title(self) -> str:
        """Fold and seeds of the jobs, e.g. "without Basel, seeds 0 and 1"."""
        *others, last = map(str, self.seeds)
        seeds = f"seeds {', '.join(others)} and {last}" if others else f"seed {last}"
        return f"{self.fold}, {seeds}" if self.fold else seeds


def read_method_distances(
    output: Path, setting: str = "", order: Sequence[str] = ()
) -> dict[str, list[MethodDistances]]:
    """Read the distances between sites that the methods of a run used.

    Args:
        output: The output folder of an experiment.
        setting: The variation that is wanted; empty outside a sweep.
        order: Labels of the algorithms in the order wanted.

    Returns:
        Name of the method -> its distances by fold and seed. Methods without any are left out, and
        so are trainings that another method's job holds.

    Raises:
        CheckpointError: The state of a server is damaged.
        StorageError: The state of a server cannot be read.
    """
    found: dict[str, list[MethodDistances]] = defaultdict(list)
    for label, fold, seed, job in _jobs(output, setting, order):
        distances = list(_distances_of(Store(job / "server")))
        same = (d for d in found[label] if (d.fold, d.distances) == (fold, distances))
        known = next(same, None)
        if known is not None:
            known.seeds.append(seed)
        elif distances:
            found[label].append(MethodDistances(fold, [seed], distances))
    return {method_name(label): distances for label, distances in found.items() if distances}


def _jobs(output: Path, setting: str, order: Sequence[str]) -> list[tuple[str, str, int, Path]]:
    """Return label, fold in words, seed and folder of every job, in the order wanted."""
    found = []
    for job in job_folders(output, setting):
        folders = job.relative_to(output / setting).parts[:-2]
        fold = ", ".join(folder.replace("-", " ", 1) for folder in folders)
        found.append((job.parent.name, fold, int(job.name.removeprefix("seed-")), job))
    return sorted(found, key=lambda job: (position((job[0], ""), order), job[1:3]))


def _distances_of(store: Store) -> Iterator[SiteDistances]:
    """Yield the distances in a server's newest state, and in those of clusters within it."""
    names = [name for name in store.names() if name.isdigit()]
    state = store.outline(names[-1]) if names else {}
    clusters = state.get("clusters")
    for part in (state, *(clusters if isinstance(clusters, list) else ())):
        for key, sites, matrix, made_of in _KINDS:
            stored = part.get(key) if isinstance(part, dict) else None
            if isinstance(stored, dict) and _is_square(stored.get(matrix), stored.get(sites)):
                yield _site_distances(stored, made_of, stored[sites], stored[matrix])


def _is_square(matrix: Any, sites: Any) -> bool:
    """Whether these are distances of sites, and not what another method calls by the same name."""
    try:
        return len(checked(matrix)) == len(sites)
    except (DataError, TypeError, ValueError):
        return False


def _site_distances(
    stored: Mapping[str, Any], made_of: str, sites: Sequence[str], matrix: Sequence[Sequence[float]]
) -> SiteDistances:
    factors = {site: factor for site, factor in stored.get("omega", {}).items() if factor != 1}
    clusters = stored.get("clusters", ())
    farthest = stored.get("most_distant", "") if factors or clusters else ""
    edges = [pair for pair in stored.get("edges", ()) if set(pair) <= set(sites)]
    return SiteDistances(made_of, sites, matrix, edges, farthest, factors, clusters)
