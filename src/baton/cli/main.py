"""The `baton` command: the group, and the split between our arguments and the engine's."""

import sys

import click

from baton import __version__
from baton.cli.ctl import ctl
from baton.cli.experts import experts
from baton.cli.frontend import frontend
from baton.cli.router import router
from baton.cli.router_run import router_run
from baton.cli.serve import serve
from baton.cli.settings_options import EXIT_CONFIG, EXIT_FAILED, report_error
from baton.cli.worker import worker


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="baton")
def cli() -> None:
    """Serve language models as distributed workers."""


router.add_command(router_run)
for _command in (serve, worker, frontend, experts, ctl, router):
    cli.add_command(_command)

_TAKE_ENGINE_ARGS = (serve.name, worker.name, frontend.name)


def main() -> None:
    """Run the command; the arguments after `--` are the engine's."""
    args = sys.argv[1:]
    cut = args.index("--") if "--" in args and args[0] in _TAKE_ENGINE_ARGS else len(args)
    try:
        cli(args[:cut], standalone_mode=False, obj=tuple(args[cut + 1 :]))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except click.Abort:
        sys.exit(EXIT_FAILED)
    except click.ClickException as error:
        sys.exit(report_error(f"{' '.join(error.format_message().split())}  (see `baton --help`)", EXIT_CONFIG))
