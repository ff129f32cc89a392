"""The command `attack`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from collegium.cli.base import Overrides, app, guarded, read_numbers
from collegium.errors import ConfigError


@app.command()
@guarded
def attack(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG_OR_RUN",
            help="The experiment's YAML file; of memberships the folder of a finished run.",
        ),
    ],
    overrides: Overrides = None,
    *,
    kind: Annotated[
        Literal["inversion", "shared", "membership"],
        typer.Option(
            help="Rebuild an image from an update, or from what is shared beside models, or tell "
            "who was trained on."
        ),
    ] = "inversion",
    sites: Annotated[
        str,
        typer.Option(help="Inversion, shared: the sites, e.g. alder,birch; by default the first."),
    ] = "",
    defences: Annotated[
        str,
        typer.Option(
            help="Inversion: those compared: none, noise R (of R times the gradient's norm), clip "
            "C, 'clip C + noise R', 'clip C + dp Z' (noise multiplier Z), or a codec."
        ),
    ] = "none,noise 0.1,noise 1,noise 10,clip 1 + dp 1.1,stc,dadaquant,cer",
    case: Annotated[
        int, typer.Option(help="Inversion, shared: the number of the training image.")
    ] = 0,
    batch: Annotated[int, typer.Option(help="Inversion: how many images a step is of.")] = 1,
    local_steps: Annotated[
        int, typer.Option(min=1, help="Inversion: the site's steps on the image.")
    ] = 1,
    steps: Annotated[int, typer.Option(help="Inversion, shared: the attacker's steps.")] = 1500,
    restarts: Annotated[int, typer.Option(help="Inversion, shared: the attacker's starts.")] = 1,
    total_variation: Annotated[
        float, typer.Option(help="Inversion, shared: the (least) weight of the total variation.")
    ] = 1e-4,
    label: Annotated[
        Literal["known", "inferred", "unknown"],
        typer.Option(help="Inversion: the label of the image; unknown: a mask is rebuilt too."),
    ] = "known",
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures", help="Inversion, shared: draw pictures of patients' images too."
        ),
    ] = False,
    shadows: Annotated[
        int, typer.Option(help="Membership: shadow models of each training and site.")
    ] = 0,
    false_positives: Annotated[
        str, typer.Option(help="Membership: the share at which members are counted.")
    ] = "0.01",
) -> None:
    """Attack what leaves a site, or the models of a run, and measure what it gives away."""
    from collegium.diagnostics.attacks.inversion import Inversion
    from collegium.diagnostics.attacks.shared_writing import write_shared
    from collegium.diagnostics.attacks.writing import write_inversion, write_membership
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.runner import read_run_config

    if kind == "membership":
        if overrides:
            raise ConfigError(
                f"memberships are inferred from a run as it is, and {overrides[0]!r} would change "
                f"it; leave it out"
            )
        share = read_numbers(false_positives, float, "false positives", "0.01")
        if len(share) != 1:
            raise ConfigError(f"the false positives are {false_positives!r}; write one share")
        written = write_membership(place, shadows=shadows, fpr=share[0])
    else:
        if place.is_dir() and overrides:
            raise ConfigError(
                f"{place} is a run with settings of its own, and {overrides[0]!r} would change "
                f"them; name the experiment's file instead"
            )
        config = read_run_config(place) if place.is_dir() else load_config(place, overrides or ())
        settings = Inversion(
            steps=steps, restarts=restarts, total_variation=total_variation, label=label
        )
        if kind == "shared":
            written = write_shared(
                config,
                settings,
                sites=_words(sites),
                case=case,
                pictures=pictures,
                notice=lambda text: typer.echo(text, err=True),
            )
        else:
            written = write_inversion(
                config,
                settings,
                sites=_words(sites),
                defences=_words(defences),
                case=case,
                batch=batch,
                local_steps=local_steps,
                pictures=pictures,
                notice=lambda text: typer.echo(text, err=True),
            )
    for text in (written.table, *written.sentences, str(written.folder)):
        typer.echo(text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
