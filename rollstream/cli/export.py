"""`rollstream export`: data sets for trainers, out of the published store."""

from pathlib import Path
from typing import Annotated

import typer

from rollstream.cli.common import Config, DataDir, err, interruptible, out, progress_bar, read_settings
from rollstream.store.exports.export import Export, Exported
from rollstream.store.exports.files import check_target
from rollstream.store.exports.request import ExportRequest, FileFormat, Format, Splits
from rollstream.store.reader import open_snapshot
from rollstream.store.report import resolve_run


def export(
    format: Annotated[Format, typer.Option("--format", "-f", help="What each row is; see docs/exports.md.")],
    to: Annotated[Path, typer.Option("--to", help="A directory, which is made.")],
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Default: the run published last.", show_default=False)
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="A condition over the columns of `rollouts`.", show_default=False),
    ] = None,
    parquet: Annotated[
        bool | None, typer.Option("--parquet/--jsonl", help="Default: Parquet; JSON lines for atif.", show_default=False)
    ] = None,
    min_reward: Annotated[
        float | None,
        typer.Option(help="Rewards from here on, instead of the environment's `success`.", show_default=False),
    ] = None,
    margin: Annotated[float, typer.Option(min=0.0, help="DPO: the least difference of rewards in a pair.")] = 0.0,
    dedupe: Annotated[bool, typer.Option("--dedupe", help="Leave out what was said word for word before.")] = False,
    split: Annotated[
        str | None,
        typer.Option(help="Shares, e.g. train=0.9,test=0.1; a task is in one of them only.", show_default=False),
    ] = None,
    split_seed: Annotated[str, typer.Option(help="Divide the tasks in another way.", show_default=False)] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the export that stands there.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Write a data set for SFT, DPO or GRPO, or trajectories in ATIF.

    Example: rollstream export nightly --format dpo --to pairs --split train=0.9,test=0.1
    """
    check_target(to, overwrite=overwrite)
    splits = Splits.parse(split, split_seed) if split else Splits()
    with interruptible(), open_snapshot(read_settings(data_dir, config).data_dir) as connection:
        names = [resolve_run(connection, run) for run in runs] if runs else [resolve_run(connection, None)]
        request = ExportRequest(
            runs=tuple(dict.fromkeys(names)),
            format=format,
            file_format=_file_format(format, parquet),
            where=where,
            min_reward=min_reward,
            margin=margin,
            dedupe=dedupe,
            splits=splits,
        )
        job = Export(connection, request)
        selection = job.choose()
        with progress_bar("exporting", total=2 * selection.groups) as progress:
            exported = job.write(selection, to, overwrite=overwrite, progress=progress)
    _print_summary(exported, request, to)


def _file_format(format: Format, parquet: bool | None) -> FileFormat:
    if parquet is None:
        return "jsonl" if format == "atif" else "parquet"
    return "parquet" if parquet else "jsonl"


def _print_summary(exported: Exported, request: ExportRequest, to: Path) -> None:
    what = f"{exported.total:,} rows of {exported.groups:,} groups"
    out.print(f"{request.format} of {', '.join(request.runs)}: {what} in {to} ({request.file_format})")
    if len(exported.rows) > 1:
        out.print(", ".join(f"{name} {rows:,}" for name, rows in exported.rows.items()))
    if exported.left_out:
        out.print("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in exported.left_out.items()))
    for name, rows in exported.rows.items():
        if not rows:
            err.print(f"note: no task fell into {name}: there are too few for that share, or try another --split-seed")
