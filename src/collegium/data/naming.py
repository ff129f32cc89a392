"""What sites call their classes and channels, and whether the same name means the same at all.

Only names of classes and channels are compared and told, never an id or a path.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from collegium.data.decoded import listed
from collegium.data.importers.about import About
from collegium.data.settings import TaskConfig

Classes = frozenset[int]


@dataclass(frozen=True)
class Names:
    """What a site calls its labels and channels, and how its configuration reads them.

    Attributes:
        site: The site's name.
        about: What its data set says of itself.
        label_map: Which stored value is which class there.
        channels: Which of the network's channels its files hold; None: all, in order.
    """

    site: str
    about: About
    label_map: Mapping[int, int] = field(default_factory=dict)
    channels: tuple[int, ...] | None = None


def name_problems(sites: Sequence[Names], task: TaskConfig, inputs: int | None) -> list[str]:
    """Give one sentence for each site where a name means something else than elsewhere.

    Names are compared without regard to case, spaces, `_` and `-`. A name that is nowhere else is
    no problem.

    Args:
        sites: What the sites call their labels and channels; one site is held to the task alone.
        task: The classes and regions that are learnt.
        inputs: How many channels the network gets, where that is said.
    """
    labels = _label_problems(sites, task) if task.name == "segmentation" else []
    return [*labels, *_channel_problems(sites, inputs)]


def channel_names(sites: Iterable[Names], inputs: int | None) -> dict[int, str]:
    """Give the names of the network's channels, as far as any site knows them."""
    names: dict[int, str] = {}
    for site in sites:
        names = _places(site, inputs) | names
    return names


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


# --- labels


def _label_problems(sites: Sequence[Names], task: TaskConfig) -> list[str]:
    """Hold each site to the sites before it, those first that agree with the task, and to that."""
    wanted = _wanted(task)
    found = {site.site: _classes(site, task) for site in sites}
    wrong = {
        name: [key for key, held in classes.items() if held not in wanted.get(key, (held,))]
        for name, classes in found.items()
    }
    settled: dict[str, tuple[str, Classes]] = {}
    problems = []
    for site in sorted(sites, key=lambda site: (bool(wrong[site.site]), site.site)):
        own = found[site.site]
        clashes = [key for key in own if key in settled and settled[key][1] != own[key]]
        if clashes:
            said = _said(site, clashes[0], own, *settled[clashes[0]])
        elif wrong[site.site]:
            key = wrong[site.site][0]
            said = _said(site, key, own, "", wanted[key][0])
        else:
            settled = {key: (site.site, held) for key, held in own.items()} | settled
            continue
        elsewhere = {key: held for key, (_, held) in settled.items()}
        problems.append(f"{said}: {_label_remedy(site, elsewhere, task)}")
    return problems


def _said(site: Names, key: str, own: Mapping[str, Classes], other: str, theirs: Classes) -> str:
    """Say that a name is another class at another site or, without one, in the task."""
    name = next(name for name in site.about.labels if _key(name) == key)
    where = f"at {other}" if other else "in task.classes"
    who = f"sites {other} and {site.site}" if other else f"site {site.site}"
    return f"{who}: {name} is {_told(theirs)} {where} and {_told(own[key])} at {site.site}"


def _wanted(task: TaskConfig) -> dict[str, list[Classes]]:
    """Give by name what the task means by it: a class, a region, or either."""
    wanted: dict[str, list[Classes]] = {}
    for value, name in enumerate(task.classes):
        wanted.setdefault(_key(name), []).append(frozenset({value}))
    for name, values in (task.regions or {}).items():
        wanted.setdefault(_key(name), []).append(frozenset(values))
    return wanted


def _classes(site: Names, task: TaskConfig) -> dict[str, Classes]:
    """Give the classes that each label of a site becomes."""
    return {
        _key(name): frozenset(_class(site, value, task) for value in values)
        for name, values in site.about.labels.items()
    }


def _class(site: Names, value: int, task: TaskConfig) -> int:
    """Give the class that a stored value becomes, as `reading.read_label` does."""
    found = site.label_map.get(value, value)
    return 1 if len(task.classes) == 2 and found in (255, 65535) else found


def _told(classes: Classes) -> str:
    return f"class{'' if len(classes) == 1 else 'es'} {listed(sorted(classes))}"


def _label_remedy(site: Names, elsewhere: Mapping[str, Classes], task: TaskConfig) -> str:
    """Say which label map gives every name of a site the class that it has elsewhere."""
    named = {_key(name): frozenset({value}) for value, name in enumerate(task.classes)}
    wanted = {key: held for key, held in elsewhere.items() if len(held) == 1} | named
    becomes = dict(site.label_map)
    for name, values in site.about.labels.items():
        if len(values) == 1:
            now = frozenset({_class(site, values[0], task)})
            (becomes[values[0]],) = wanted.get(_key(name), now)
    moved = {value: label for value, label in sorted(becomes.items()) if value != label}
    single = [values for values in site.about.labels.values() if len(values) == 1]
    told = len(single) == len(site.about.labels) and max(becomes.values()) < len(task.classes)
    kept = {_class(site, values[0], task) for values in single}
    if told and len({becomes[values[0]] for values in single}) == len(kept):
        remedy = f"set label_map: {moved} at site {site.site}"
    else:
        remedy = f"set label_map at site {site.site} to the class of each stored value"
    return f"{remedy}, or correct {site.about.source} there if the masks are right without"


# --- channels


def _places(site: Names, inputs: int | None) -> dict[int, str]:
    """Give the name of each of the network's channels that a site has."""
    names, channels = site.about.channels, site.channels
    if channels is None:
        return dict(enumerate(names))
    if len(channels) == len(names):
        return dict(zip(channels, names, strict=True))
    if len(names) == inputs:  # the files hold all, of which only these count
        return {place: names[place] for place in channels if place < len(names)}
    return {}


def _channel_problems(sites: Sequence[Names], inputs: int | None) -> list[str]:
    """Hold each site to the sites before it, those with the most channels first."""
    settled: list[tuple[Names, dict[str, int]]] = []
    problems = []
    for site in sorted(sites, key=lambda site: (-len(_places(site, inputs)), site.site)):
        places = _places(site, inputs)
        own = {_key(name): place for place, name in places.items()}
        if len(own) < len(places):  # several channels are called alike
            continue
        other = next(
            (
                o
                for o, theirs in settled
                if own.keys() <= theirs.keys() and own.items() - theirs.items()
            ),
            None,
        )
        if other is None:
            settled.append((site, own))
        else:
            problems.append(_channel_problem(site, other, inputs))
    return problems


def _channel_problem(site: Names, other: Names, inputs: int | None) -> str:
    own, theirs = _places(site, inputs), _places(other, inputs)
    place = next(place for place in own if _key(theirs.get(place, "")) != _key(own[place]))
    where = {_key(name): place for place, name in theirs.items()}
    remedy = f"give its files the order {listed(theirs.values())}"
    if len(own) == len(site.about.channels):
        channels = [where[_key(name)] for name in site.about.channels]
        remedy = f"set channels: {channels} at site {site.site}"
        remedy += f" and image.inputs: {max(theirs) + 1}" if inputs is None else ""
    return (
        f"sites {other.site} and {site.site}: channel {place} is "
        f"{theirs.get(place, 'nothing')} at {other.site} and {own[place]} at {site.site}, whose "
        f"channels have another order: {remedy}, or correct {site.about.source} there if its files "
        "are in order"
    )
