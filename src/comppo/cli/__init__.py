"""The `comppo` command. One module per command; everything heavy is imported when a command runs."""

import sys
from importlib import import_module

import click

from comppo.errors import ComppoError

COMMANDS = {
    "quickstart": "Train the bundled model with CompPO and GRPO and compare them, in minutes on a CPU.",
    "train": "Train a causal language model with CompPO.",
    "check-model": "Say what can be read of a model, how exactly, and at what cost.",
    "audit": "Hold the credit of operators against the true advantages of a model's own tokens.",
    "inspect": "Write a page on which a person reads where credit goes, token by token.",
}


class LazyGroup(click.Group):
    """Knows its commands by name and imports the module of the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"comppo.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="comppo")
def cli() -> None:
    """Computation-conditioned credit transport for LLM reinforcement learning."""


def main() -> None:
    """Run the command line; errors that comppo raises on purpose are one message and exit code 2."""
    try:
        cli()
    except ComppoError as error:
        click.echo(f"comppo: {error}", err=True)
        sys.exit(2)
