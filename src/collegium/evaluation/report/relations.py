"""How far sites are apart to the methods that ask: what the servers of a run keep of it.

Distance-aware methods keep distances with the weights or clusters that follow, pFedNet the graph of
similar sites.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collegium.errors import DataError
from collegium.evaluation.scores import position
from collegium.evaluation.tables import method_name
from collegium.heterogeneity.distances import checked
from collegium.runtime.state import Store

_CELLS = ("*/seed-*/server", "without-*/*/seed-*/server")
"""The servers' folders in the folder of a setting, without folds and with."""

_KINDS = (
    ("distance", "sites", "matrix", "what they told of their data"),
    ("graph", "clients", "distances", "sketches of their data"),
)
"""A key of a server's state, the keys of sites and distances there, and what these are made of."""


@dataclass(frozen=True)
class Relation:
    """The distances between sites that one method uses.

    Attributes:
        made_of: What the distances are made of, for a reader.
        sites: In the order of the matrix.
        matrix: Distances.
        edges: The pairs of sites that the method ties to each other.
        most_distant: The site whose distances sum to the most; empty where nothing follows.
        factors: By site what its weight is multiplied by; empty where weights stay as they are.
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
        """Return the input of `collegium.evaluation.report.assessment.network_svg`."""
        return {
            "made_of": self.made_of,
            "sites": self.sites,
            "matrix": self.matrix,
            "edges": self.edges,
            "most_distant": self.most_distant,
            "clusters": {"recommended": self.clusters} if self.clusters else {},
        }


@dataclass
class Related:
    """The relations of one or more cells of a method, which have the same.

    Attributes:
        left_out: The site that is outside in the fold; empty without folds.
        seeds: The seeds.
        relations: What the server keeps.
    """

    left_out: str
    seeds: list[int]
    relations: list[Relation]

    @property
    def title(self) -> str:
        """Return in words which jobs they are, e.g. "without Basel, seeds 0 and 1"."""
        *others, last = map(str, self.seeds)
        seeds = f"seeds {', '.join(others)} and {last}" if others else f"seed {last}"
        return f"without {self.left_out}, {seeds}" if self.left_out else seeds


def read_relations(
    output: Path, setting: str = "", order: Sequence[str] = ()
) -> dict[str, list[Related]]:
    """Read how far sites are apart to the methods of a run.

    Args:
        output: The output folder of an experiment.
        setting: The variation that is wanted; empty outside a sweep.
        order: Labels of the algorithms in the order wanted.

    Returns:
        Name of the method -> its relations by fold and seed. Methods without any are left out, and
        so are trainings that another method's cell holds.

    Raises:
        CheckpointError: The state of a server is damaged.
        StorageError: The state of a server cannot be read.
    """
    found: dict[str, list[Related]] = defaultdict(list)
    for label, left_out, seed, folder in _servers(output / setting, order):
        relations = list(_kept(Store(folder)))
        same = (r for r in found[label] if (r.left_out, r.relations) == (left_out, relations))
        related = next(same, None)
        if related is not None:
            related.seeds.append(seed)
        elif relations:
            found[label].append(Related(left_out, [seed], relations))
    return {method_name(label, ""): related for label, related in found.items() if related}


def _servers(base: Path, order: Sequence[str]) -> list[tuple[str, str, int, Path]]:
    """Return label, site left out, seed and folder of every server, in the order wanted."""
    found = []
    for pattern in _CELLS:
        for folder in base.glob(pattern):
            cell = folder.parent
            fold = cell.parents[1].relative_to(base).name.removeprefix("without-")
            found.append((cell.parent.name, fold, int(cell.name.removeprefix("seed-")), folder))
    return sorted(found, key=lambda one: (position((one[0], ""), order), one[1:3]))


def _kept(store: Store) -> Iterator[Relation]:
    """Yield the relations in a server's newest state, and in those of clusters within it."""
    names = [name for name in store.names() if name.isdigit()]
    state = store.outline(names[-1]) if names else {}
    clusters = state.get("clusters")
    for part in (state, *(clusters if isinstance(clusters, list) else ())):
        for key, sites, matrix, made_of in _KINDS:
            kept = part.get(key) if isinstance(part, dict) else None
            if isinstance(kept, dict) and _is_square(kept.get(matrix), kept.get(sites)):
                yield _relation(kept, made_of, kept[sites], kept[matrix])


def _is_square(matrix: Any, sites: Any) -> bool:
    """Whether these are distances of sites, and not what another method calls by the same name."""
    try:
        return len(checked(matrix)) == len(sites)
    except (DataError, TypeError, ValueError):
        return False


def _relation(
    kept: Mapping[str, Any], made_of: str, sites: Sequence[str], matrix: Sequence[Sequence[float]]
) -> Relation:
    factors = {site: factor for site, factor in kept.get("omega", {}).items() if factor != 1}
    clusters = kept.get("clusters", ())
    farthest = kept.get("most_distant", "") if factors or clusters else ""
    edges = [pair for pair in kept.get("edges", ()) if set(pair) <= set(sites)]
    return Relation(made_of, sites, matrix, edges, farthest, factors, clusters)
