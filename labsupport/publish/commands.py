"""The commands of maintainers: list, run, check, publish, claims. Each is a thin line over a function."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from labsupport.publish import published
from labsupport.publish.catalogue import Book, UsageError, all_books, find_root, parse_parameters, select
from labsupport.publish.processes import busy_neighbour
from labsupport.publish.report import OUTCOMES
from labsupport.publish.run import Run, executed_copy, result_file, run_labs
from labsupport.units import format_bytes, format_seconds

EPILOG = """\b
Exit codes:
  0    all went well, and every published number held
  1    a lab failed, a published number no longer holds, or not one sample fits
  2    the request makes no sense: unknown lab, parameter or option, unreadable file, nothing to write to
  130  interrupted; what ran until then is kept in build/
"""
OUTCOMES_TEXT = "".join(f"  {name:8} {meaning}\n" for name, meaning in OUTCOMES.items())

labs_argument = click.argument("labs", nargs=-1, metavar="[LAB]...")
build_option = click.option(
    "--build", type=click.Path(file_okay=False, path_type=Path), help="Folder of runs [build/]."
)
profile_option = click.option(
    "--profile",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="The device: auto takes a GPU on which a kernel really runs, else the CPU.",
)
timeout_option = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=600, show_default=True, help="Seconds for each lab."
)


@click.command("list")
def list_command() -> None:
    """The labs, with their time, hardware and parameters.

    \b
    Example:
      labs list
    """
    for book in all_books(find_root()):
        about = f"{book.metadata.get('seconds', '?')} s, {book.metadata.get('hardware', 'CPU or GPU')}"
        click.echo(f"{book.id}  {book.title}  ({about})")
        for name, default in book.parameters.items():
            click.echo(f"      -p {name}={default}")


@click.command("run", epilog=EPILOG)
@labs_argument
@profile_option
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Labs at once; timing labs run alone."
)
@timeout_option
@click.option("-p", "pairs", multiple=True, metavar="NAME=VALUE", help="A parameter of the lab (see labs list).")
@build_option
def run_command(
    labs: tuple[str, ...], profile: str, jobs: int, timeout_s: float, pairs: tuple[str, ...], build: Path | None
) -> None:
    """Execute labs with papermill. Executed copies, HTML pages and records go to build/.

    \b
    Examples:
      labs run                       every lab
      labs run 00 01                 these two
      labs run 00 -p price_per_hour=3.2
      labs run --profile cpu --timeout 300
    """
    root = find_root()
    books = select(root, labs)
    parameters = parse_parameters(books, pairs)
    if not books:
        raise UsageError(f"there are no labs in {root / 'notebooks'}")
    build = build or root / "build"
    failed, finished = False, []
    try:
        for book, run in _with_progress(books, build, profile, jobs, timeout_s, parameters):
            finished.append(book.id)
            failed |= run.status != "ok"
            click.echo(_line(book, run, build))
    except KeyboardInterrupt:
        kept = f"labs {', '.join(finished)} ran and are kept in {build}/" if finished else "no lab had finished"
        click.echo(f"\nlabs: interrupted: {kept}; nothing is left running", err=True)
        raise
    sys.exit(1 if failed else 0)


def _with_progress(
    books: list[Book], build: Path, profile: str, jobs: int, timeout_s: float, parameters: dict[str, Any]
) -> Any:
    """`run_labs`, with a bar while it runs. The bar is only for terminals: a log gets one line a lab."""
    from tqdm import tqdm

    cells = sum(len(book.notebook["cells"]) for book in books)
    with tqdm(total=cells, unit="cell", leave=False, disable=not sys.stderr.isatty()) as bar:

        def on_cell(book: Book, cell: int, of: int) -> None:
            bar.set_description(f"lab {book.id}, cell {cell + 1} of {of}", refresh=False)
            bar.update()

        options = {"profile": profile, "jobs": jobs, "timeout_s": timeout_s, "parameters": parameters}
        for book, run in run_labs(books, build, on_cell=on_cell, **options):  # type: ignore[arg-type]
            bar.clear()
            yield book, run


def _line(book: Book, run: Run, build: Path) -> str:
    state = "ok" if run.status == "ok" else run.status.upper()
    about = f"{format_seconds(run.seconds)}, peak {format_bytes(run.peak_bytes)}, {len(run.records)} records"
    line = f"{book.id}  {state:8} {about}  {book.title}"
    if run.status == "ok":
        return line
    where = f"In [{run.cell}] of " if run.cell else ""
    return f"{line}\n      {where}{executed_copy(book, build)}\n      {run.error}"


@click.command(
    "check",
    epilog="\b\nOutcomes of a record:\n" + OUTCOMES_TEXT + "\n" + EPILOG,
    short_help="Compare the last run with what is published.",
)
@labs_argument
@timeout_option
@build_option
def check_command(labs: tuple[str, ...], timeout_s: float, build: Path | None) -> None:
    """Compare the last run with what is published; exit 1 when a number no longer holds.

    A ratio out of its band is measured once more before it counts as broken.

    \b
    Examples:
      labs check
      labs check 00
    """
    from labsupport.publish.check import check

    root = find_root()
    build = build or root / "build"

    def again(book: Book) -> Run:
        click.echo(f"{book.id}  a ratio is out of its band: measuring it once more")
        profile = Run.load(result_file(book, build)).profile
        return next(run for _, run in run_labs([book], build / "again", profile=profile, timeout_s=timeout_s))

    report = check(select(root, labs), build, published.load_all(), again=again)
    click.echo(report.text)
    sys.exit(0 if report.ok else 1)


@click.command("publish", epilog=EPILOG, short_help="Make the last run the published one.")
@labs_argument
@click.option(
    "--rebase",
    type=click.IntRange(min=5),
    metavar="N",
    help="Run N times (5 or more, every other time beside a busy process) and set each ratio's band.",
)
@click.option("--values-only", is_flag=True, help="Leave the notebooks: a second machine's values beside the first's.")
@profile_option
@timeout_option
@build_option
def publish_command(
    labs: tuple[str, ...], rebase: int | None, values_only: bool, profile: str, timeout_s: float, build: Path | None
) -> None:
    """Make the last run the published one: outputs in notebooks/, values in labsupport/published/.

    \b
    Examples:
      labs publish 00
      labs publish 00 --rebase 6     six runs; the last is published, all set the bands
    """
    from labsupport.publish import release

    root = find_root()
    build = build or root / "build"
    books = select(root, labs)
    seen: dict[str, dict[str, list[float]]] = {}
    for turn in range(1, (rebase or 0) + 1):
        # A published band meets machines with neighbours, so every other run has one. The last run is a quiet one.
        with busy_neighbour() if (rebase or 0) - turn & 1 else nullcontext():
            for book, run in _with_progress(books, build, profile, 1, timeout_s, {}):
                click.echo(f"run {turn} of {rebase}: {_line(book, run, build)}")
                if run.status != "ok":
                    raise UsageError(f"no band was set: lab {book.id} has to run {rebase} times without an error")
                for name, record in run.records.items():
                    if record.kind == "ratio":
                        seen.setdefault(book.id, {}).setdefault(name, []).append(record.value)
    bands = {lab: {name: release.band_of(values) for name, values in found.items()} for lab, found in seen.items()}
    texts = release.staged(root, books, build, published.load_all(), bands=bands, values_only=values_only)
    changed = release.write_all(texts)
    for path in changed:
        click.echo(f"wrote {path}")
    if not changed:
        click.echo("nothing changed: this run is the published one")


@click.command("claims", short_help="The published claims, and what the numbers say of them.")
@click.option("--markdown", is_flag=True, help="As a Markdown table.")
def claims_command(markdown: bool) -> None:
    """The published claims that the labs put to the test, and what each machine's numbers say of them.

    \b
    Example:
      labs claims
    """
    from labsupport.publish import claims

    values = {
        family: {
            f"{lab}/{name}": entry.record for lab, entries in found.labs.items() for name, entry in entries.items()
        }
        for family, found in published.load_all().items()
    }
    render: Callable[[Any], str] = claims.claims_markdown if markdown else claims.claims_text
    click.echo(render(values))


COMMANDS = (list_command, run_command, check_command, publish_command, claims_command)
