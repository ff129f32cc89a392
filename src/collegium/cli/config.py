"""The commands about configurations: `config show`."""

import typer

from collegium.cli.base import ConfigPath, Overrides, app, guarded

config_app = typer.Typer(help="Show configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@config_app.command("show")
@guarded
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print a configuration with every default filled in."""
    from collegium.experiment.config.experiment import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)
