"""The command line: `labs`. Each command is a thin line over a function of the package."""

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from labsupport.publish import commands
from labsupport.publish.catalogue import UsageError
from labsupport.publish.published import PublishedError

COMPARISON_JSON = ("names", "ratio", "interval", "total_ratio", "margin", "verdict", "interleaved", "n")
BATCH_EPILOG = """\b
Exit codes:
  0    a batch was found, or planned
  1    not even one sample fits, or none within the trial's limit
  2    the request makes no sense, the file has an error of its own, or there is neither plan nor search
  130  interrupted
"""


class Commands(click.Group):
    """Turns our own errors into one clear line and exit code 2, and Ctrl-C into 130. Lists the commands by whom they
    are for."""

    def invoke(self, ctx: click.Context) -> Any:
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            return super().invoke(ctx)
        except (UsageError, PublishedError) as error:
            click.echo(f"labs: {error}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        ours = [str(command.name) for command in commands.COMMANDS]
        groups: dict[str, list[str]] = {
            "For your own models": [name for name in self.commands if name not in ours],
            "For maintainers": ours,
        }
        for title, names in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(75)) for name in names])


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@click.group(cls=Commands, epilog=commands.EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="labsupport")
def main() -> None:
    """Feed the GPU: run the labs, check every published number, publish a run.

    \b
    labs batch FILE:NAME  which batch fits, and which is worth it?
    labs compare A B      is step B faster than step A?
    labs run 00           execute one lab into build/
    labs check            which published number no longer holds?
    labs run --help       more, with examples
    """


for command in commands.COMMANDS:
    main.add_command(command)


@main.command("batch", epilog=BATCH_EPILOG, short_help="The batch that fits your own model, and the one to take.")
@click.argument("workload", metavar="FILE.py:NAME")
@click.option("--budget", metavar="SIZE", help="Bytes for tensors, as in 12GiB. [what is free here]")
@click.option("--accelerator", metavar="NAME", help="A card of the table instead, as in T4; 90 % of its memory counts.")
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True, help="Whose parts are shown.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="bf16, fp16: autocast.",
)
@click.option("--checkpointing", is_flag=True, help="Compute each block again in the backward pass.")
@click.option("--max-batch", type=click.IntRange(min=1), help="Search no further than this.")
@click.option("--multiple-of", type=click.IntRange(min=1), default=1, show_default=True, help="Only such sizes.")
@click.option(
    "--trial-limit",
    "trial_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="Seconds for each trial.",
)
@click.option("--plan-only", is_flag=True, help="Run no step: only what the plan says.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def batch_command(workload: str, as_json: bool, **options: Any) -> None:
    """The memory of your own Workload, its largest batch on each card, and the batch to take here.

    NAME is a labsupport.Workload at the top of FILE.py, or a function without arguments that returns one. A budget
    larger than what is free here is only planned.

    \b
    Examples:
      labs batch train.py:workload
      labs batch train.py:workload --budget 2GiB --multiple-of 8
      labs batch train.py:workload --accelerator T4 --plan-only --json
    """
    import torch

    from labsupport.diagnose.batch_report import report_batch
    from labsupport.diagnose.user_files import named_in_file
    from labsupport.train import Workload

    try:
        with named_in_file(workload, Workload) as given:
            report = report_batch(given, progress=None if as_json else partial(click.echo, err=True), **options)
    except (torch.OutOfMemoryError, TimeoutError) as error:
        limit = " (--trial-limit)" if isinstance(error, TimeoutError) else ""
        click.echo(f"labs: {error}{limit}", err=True)
        sys.exit(1)
    except (ValueError, TypeError) as error:
        raise UsageError(f"batch {workload}: {error}") from error
    click.echo(json.dumps(report.as_dict()) if as_json else "\n".join(report.lines))
    sys.exit(1 if report.nothing_fits else 0)


@main.command("compare", short_help="Is AFTER faster than BEFORE? Two saved measurements.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--margin", default=0.05, show_default=True, help="Ratios within 1 ± margin count as the same.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def compare_command(before: Path, after: Path, margin: float, as_json: bool) -> None:
    """Is AFTER faster than BEFORE? Two saved measurements of one machine; exit code 0 whatever the verdict.

    In Python, measure(step).save("before.json") saves one; measure is in labsupport.measure. Whatever else changed
    between the two is in the ratio too: where one process can run both steps, its compare(a, b) takes them in turns.

    \b
    Examples:
      labs compare before.json after.json
      labs compare before.json after.json --margin 0.1 --json
    """
    from labsupport.measure import Measurement, compare_apart

    try:
        a, b = Measurement.load(before), Measurement.load(after)
    except (OSError, ValueError) as error:
        what = f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        raise UsageError(f"{what}; give a file that measure(step).save(path) wrote") from error
    try:
        found = compare_apart(a, b, margin=margin)
    except ValueError as error:
        raise UsageError(f"compare {before} {after}: {error}") from error
    twice = ["both files hold the same measurement: the ratio says nothing"] if a == b else []
    told = {**{name: getattr(found, name) for name in COMPARISON_JSON}, "warnings": [*found.warnings, *twice]}
    text = "\n  warning: ".join([str(found), *twice])
    click.echo(json.dumps(told) if as_json else text)


if __name__ == "__main__":
    main()
