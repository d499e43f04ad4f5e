"""The command line: every command of stemserve."""

import typer

from stemserve.service.commands import prefixes as cli_prefixes
from stemserve.service.commands.explain import explain
from stemserve.service.commands.generate import generate
from stemserve.service.commands.score import score
from stemserve.service.commands.serve import serve, worker

app = typer.Typer(
    help="Score and generate with a language model over prefixes that requests share.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve)
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # --help is the worker's
    },
)(worker)
app.command()(score)
app.command()(generate)
app.add_typer(cli_prefixes.app, name="prefixes")
app.command()(explain)


def main() -> None:
    app()
