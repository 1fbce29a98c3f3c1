"""`completion`: print the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from arroyo_dagster.cli.common import main

NAME = "arroyo-state"
VARIABLE = "_ARROYO_STATE_COMPLETE"


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    Load it in the start file of the shell:
      bash  ~/.bashrc                    eval "$(arroyo-state completion bash)"
      zsh   ~/.zshrc                     eval "$(arroyo-state completion zsh)"
      fish  ~/.config/fish/config.fish   arroyo-state completion fish | source

    \b
    Example:
      arroyo-state completion bash
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, NAME, VARIABLE).source())
