"""Checks that names of labels and channels mean the same at all sites, and that none is lacking.

Only names of labels and channels are compared and reported, never an id or a path.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from collegium.data.columns import spelling_key
from collegium.data.decoded_image import listed
from collegium.data.importers.common import DatasetDescription
from collegium.data.settings import TaskConfig

Classes = frozenset[int]


@dataclass(frozen=True)
class SiteNames:
    """The names of a site's labels and channels, and how its configuration interprets them.

    Attributes:
        site: The site's name.
        description: Its data set's own description.
        label_map: The class of each stored value there.
        channels: The network's channels that its files hold; None: all, in order.
        labelled: The classes that its configuration says are annotated; None: it does not say.
        segments: The classes of each segment of its DICOM segmentations, if it has some.
    """

    site: str
    description: DatasetDescription
    label_map: Mapping[int, int] = field(default_factory=dict)
    channels: tuple[int, ...] | None = None
    labelled: tuple[str, ...] | None = None
    segments: frozenset[Classes] = frozenset()


def name_problems(sites: Sequence[SiteNames], task: TaskConfig, inputs: int | None) -> list[str]:
    """Return one sentence for each site at which a name has another meaning than elsewhere.

    Names are compared as `spelling_key` says. A name that occurs nowhere else is not a problem. If
    a site's own description, or its DICOM segments, name some of the task's structures and not all,
    the others are not annotated there, as far as it says, and the site has to decide what that
    means by its `labelled`.

    Args:
        sites: The names at each site; a single site is compared with the task alone.
        task: The classes and regions to be learnt.
        inputs: The number of the network's channels, if it is configured.
    """
    labels = _label_problems(sites, task) if task.name == "segmentation" else {}
    lacking = [
        problem
        for site in sites
        if task.name == "segmentation" and site.site not in labels and site.labelled is None
        for problem in _annotation_problems(site, task)
    ]
    return [*labels.values(), *lacking, *_channel_problems(sites, inputs)]


def name_notes(sites: Sequence[SiteNames], task: TaskConfig, inputs: int | None) -> list[str]:
    """Return one sentence for each class and channel that sites call by different names.

    They may be two names of one thing, or two things, which no comparison of names can tell.

    Args:
        sites: The names at each site.
        task: The classes to be learnt.
        inputs: The number of the network's channels, if it is configured.
    """
    called: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for site in sorted(sites, key=lambda site: site.site):
        singles = {}
        if task.name == "segmentation":
            labels = site.description.labels.items()
            singles = {_class(site, v[0], task): name for name, v in labels if len(v) == 1}
        things = {f"class {value}": name for value, name in singles.items() if value}
        things |= {f"channel {n}": name for n, name in _places(site, inputs).items() if name}
        for thing, name in things.items():
            names = called.setdefault(thing, {})
            names.setdefault(spelling_key(name), (name, []))[1].append(site.site)
    notes = []
    for thing, names in sorted(called.items()):
        told = " and ".join(f"{name} at {listed(where)}" for name, where in names.values())
        if len(names) > 1:
            notes.append(
                f"{thing} is called {told}: if these are two things, correct label_map or channels "
                f"at one of the sites"
            )
    return notes


def channel_names(sites: Iterable[SiteNames], inputs: int | None) -> dict[int, str]:
    """Return the names of the network's channels, as far as any site states them.

    Args:
        sites: The names at each site.
        inputs: The number of the network's channels, if it is configured.
    """
    names: dict[int, str] = {}
    for site in sites:
        names = _places(site, inputs) | names
    return names


# --- labels


def _annotation_problems(site: SiteNames, task: TaskConfig) -> list[str]:
    """Return a sentence on the structures that a site's description does not name.

    A structure is named if the description tells its classes from all others.
    """
    named = site.segments or _classes(site, task).values()
    sets = [held for held in named if 0 not in held]
    if not sets:
        return []
    source = "its DICOM segments do" if site.segments else f"{site.description.source} there does"
    told = [tuple(value in held for held in sets) for value in range(len(task.classes))]
    regions = {name: {*values} for name, values in (task.regions or {}).items()}
    structures = regions or {name: {k} for k, name in enumerate(task.classes) if k}
    lacking = [
        name
        for name, own in structures.items()
        if {told[value] for value in own}
        & {word for value, word in enumerate(told) if value not in own}
    ]
    if not lacking:
        return []
    every, kept = listed(task.classes[1:]), [name for name in structures if name not in lacking]
    if regions:
        remedy = "take the site out, as the loss of regions cannot leave some of them out"
    elif kept:
        remedy = f"set labelled: [{listed(kept)}] there, which leaves it out of loss and scores"
    else:
        remedy = "set label_map there to the class of each stored value"
    return [
        f"site {site.site}: {source} not name {listed(lacking)}, so that what its images show of "
        f"it would be learnt and scored as background: {remedy}; or, if its masks annotate "
        f"everything wherever it is, say so by labelled: [{every}] there"
    ]


def _label_problems(sites: Sequence[SiteNames], task: TaskConfig) -> dict[str, str]:
    """Compare each site with the task and earlier sites; those that agree with it come first."""
    wanted = _wanted(task)
    found = {site.site: _classes(site, task) for site in sites}
    wrong = {
        name: [key for key, held in classes.items() if held not in wanted.get(key, (held,))]
        for name, classes in found.items()
    }
    settled: dict[str, tuple[str, Classes]] = {}
    problems = {}
    for site in sorted(sites, key=lambda site: (bool(wrong[site.site]), site.site)):
        own = found[site.site]
        clashes = [key for key in own if key in settled and settled[key][1] != own[key]]
        if clashes:
            conflict = _conflict(site, clashes[0], own, *settled[clashes[0]])
        elif wrong[site.site]:
            key = wrong[site.site][0]
            conflict = _conflict(site, key, own, "", wanted[key][0])
        else:
            settled = {key: (site.site, held) for key, held in own.items()} | settled
            continue
        elsewhere = {key: held for key, (_, held) in settled.items()}
        problems[site.site] = f"{conflict}: {_label_remedy(site, elsewhere, task)}"
    return problems


def _conflict(
    site: SiteNames, key: str, own: Mapping[str, Classes], other: str, theirs: Classes
) -> str:
    """Describe a name that means another class at another site or, without one, in the task."""
    name = next(name for name in site.description.labels if spelling_key(name) == key)
    where = f"at {other}" if other else "in task.classes"
    who = f"sites {other} and {site.site}" if other else f"site {site.site}"
    return f"{who}: {name} is {_in_words(theirs)} {where} and {_in_words(own[key])} at {site.site}"


def _wanted(task: TaskConfig) -> dict[str, list[Classes]]:
    """Return the meanings of each name in the task: a class, a region, or either."""
    wanted: dict[str, list[Classes]] = {}
    for value, name in enumerate(task.classes):
        wanted.setdefault(spelling_key(name), []).append(frozenset({value}))
    for name, values in (task.regions or {}).items():
        wanted.setdefault(spelling_key(name), []).append(frozenset(values))
    return wanted


def _classes(site: SiteNames, task: TaskConfig) -> dict[str, Classes]:
    """Return the classes that each label of a site becomes."""
    return {
        spelling_key(name): frozenset(_class(site, value, task) for value in values)
        for name, values in site.description.labels.items()
    }


def _class(site: SiteNames, value: int, task: TaskConfig) -> int:
    """Return the class that a stored value becomes, as `reading.read_label` does."""
    found = site.label_map.get(value, value)
    return 1 if len(task.classes) == 2 and found in (255, 65535) else found


def _in_words(classes: Classes) -> str:
    return f"class{'' if len(classes) == 1 else 'es'} {listed(sorted(classes))}"


def _label_remedy(site: SiteNames, elsewhere: Mapping[str, Classes], task: TaskConfig) -> str:
    """Advise the label map that gives every name of a site the class that it has elsewhere."""
    named = {spelling_key(name): frozenset({value}) for value, name in enumerate(task.classes)}
    wanted = {key: held for key, held in elsewhere.items() if len(held) == 1} | named
    becomes = dict(site.label_map)
    for name, values in site.description.labels.items():
        if len(values) == 1:
            now = frozenset({_class(site, values[0], task)})
            (becomes[values[0]],) = wanted.get(spelling_key(name), now)
    moved = {value: label for value, label in sorted(becomes.items()) if value != label}
    single = [values for values in site.description.labels.values() if len(values) == 1]
    known = len(single) == len(site.description.labels)
    valid = known and max(becomes.values()) < len(task.classes)
    kept = {_class(site, values[0], task) for values in single}
    if valid and len({becomes[values[0]] for values in single}) == len(kept):
        remedy = f"set label_map: {moved} at site {site.site}"
    else:
        remedy = f"set label_map at site {site.site} to the class of each stored value"
    return f"{remedy}, or correct {site.description.source} there if the masks are right without"


# --- channels


def _places(site: SiteNames, inputs: int | None) -> dict[int, str]:
    """Return the name of each of the network's channels that a site has."""
    names, channels = site.description.channels, site.channels
    if channels is None:
        return dict(enumerate(names))
    if len(channels) == len(names):
        return dict(zip(channels, names, strict=True))
    if len(names) == inputs:  # the files hold all, of which only these count
        return {place: names[place] for place in channels if place < len(names)}
    return {}


def _channel_problems(sites: Sequence[SiteNames], inputs: int | None) -> list[str]:
    """Compare each site with the sites before it, those with the most channels first."""
    settled: list[tuple[SiteNames, dict[str, int]]] = []
    problems = []
    for site in sorted(sites, key=lambda site: (-len(_places(site, inputs)), site.site)):
        places = _places(site, inputs)
        own = {spelling_key(name): place for place, name in places.items()}
        if len(own) < len(places):  # several channels are called alike
            continue
        for other, theirs in settled:
            if own.keys() <= theirs.keys() and own != {name: theirs[name] for name in own}:
                problems.append(_channel_problem(site, other, inputs))
                break
        else:
            settled.append((site, own))
    return problems


def _channel_problem(site: SiteNames, other: SiteNames, inputs: int | None) -> str:
    own, theirs = _places(site, inputs), _places(other, inputs)
    place = next(
        place for place in own if spelling_key(theirs.get(place, "")) != spelling_key(own[place])
    )
    where = {spelling_key(name): place for place, name in theirs.items()}
    remedy = f"give its files the order {listed(theirs.values())}"
    if len(own) == len(site.description.channels):
        channels = [where[spelling_key(name)] for name in site.description.channels]
        remedy = f"set channels: {channels} at site {site.site}"
        remedy += f" and image.inputs: {max(theirs) + 1}" if inputs is None else ""
    return (
        f"sites {other.site} and {site.site}: channel {place} is "
        f"{theirs.get(place, 'nothing')} at {other.site} and {own[place]} at {site.site}, whose "
        f"channels have another order: {remedy}, or correct {site.description.source} there if its "
        "files are in order"
    )
