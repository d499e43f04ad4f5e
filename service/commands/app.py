"""The command line: every command of stemserve."""

import typer

from stemserve.service import quiet_grpc as quiet_grpc  # first
from stemserve.service.commands import prefixes as cli_prefixes
from stemserve.service.commands import tries as cli_tries
from stemserve.service.commands.bench import bench
from stemserve.service.commands.calibrate import calibrate
from stemserve.service.commands.call import access_options
from stemserve.service.commands.capacity import capacity
from stemserve.service.commands.explain import explain
from stemserve.service.commands.generate import generate
from stemserve.service.commands.make_key import make_key
from stemserve.service.commands.score import score
from stemserve.service.commands.serve import serve
from stemserve.service.commands.worker import worker

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback()(access_options)
app.command(short_help="Start the server.")(serve)
app.command(
    short_help="Run a worker alone, for a server elsewhere.",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # --help is the worker's
    },
)(worker)
app.command(short_help="Score many items that continue one text, or several.")(score)
app.command(short_help="Continue a prompt, with one or several samples.")(generate)
app.add_typer(cli_prefixes.app, name="prefixes", short_help="Register, show, renew, release.")
app.add_typer(cli_tries.app, name="tries", short_help="Upload, show, delete sets of sequences.")
app.command(short_help="Show the prefix forest of a request and its costs.")(explain)
app.command(short_help="Measure what attention costs on this machine.")(calibrate)
app.command(
    short_help="Predict how many GPUs a load needs.",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(capacity)
app.command(short_help="Measure a server, or the rows of the baselines.")(bench)
app.command(short_help="Make a key for a caller.")(make_key)
