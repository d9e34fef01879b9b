"""`drivetrain data`: makes and verifies data to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, debuggable, print_json

__all__ = ["app"]

app = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make data to train on, and verify them.",
)


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain data tokenize texts/ --tokenizer gpt2/ --out tokens\n\n"
    "drivetrain data tokenize web.jsonl.gz more.parquet --field content "
    "--tokenizer tokenizer.json --end '<|endoftext|>' --out tokens\n\n"
    "[bold]From Python[/]: drivetrain.cli.data.tokenize.tokenize, and drivetrain.TokenShards to "
    "train on them"
)
@debuggable
def tokenize(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Files (.txt, .md, .jsonl, .parquet; texts also with .gz), folders of them, or "
            "data sets that the datasets library saved.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="A folder for transformers' AutoTokenizer, or a JSON file of the tokenizers "
            "library.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for the shards.", show_default=False)],
    field: Annotated[
        str, typer.Option(help="The key or column with the text, of JSONL, Parquet and data sets.")
    ] = "text",
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line of a text file is a document, not the file.")
    ] = False,
    end: Annotated[
        str | None,
        typer.Option(
            help="The token after each document ('' for none); by default the tokenizer's own.",
            show_default=False,
        ),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = 1 << 27,
    json: AsJson = False,
) -> None:
    """Turn texts into shards of tokens; the same command resumes after an interruption."""
    from ...kernel.errors import printable
    from ...run.quoted import say
    from ..data.tokenize import TokenizeRequest
    from ..data.tokenize import tokenize as run

    request = TokenizeRequest(inputs, tokenizer, out, field, lines, end, shard_tokens)
    found = run(request, say)
    if json:
        print_json(found)
    else:
        counted = f"{found['tokens']} tokens of {found['documents']} documents"
        stored = f"{found['shards']} shards ({found['dtype']})"
        typer.echo(printable(f"{found['folder']}: {counted} in {stored}"))


@app.command(
    epilog="[bold]Example[/]\n\ndrivetrain data verify tokens\n\n"
    "[bold]From Python[/]: drivetrain.TokenShards.damaged"
)
@debuggable
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Shards of tokens.")],
) -> None:
    """Read every token and compare checksums; exit 1 and name each shard that is damaged."""
    from ...data.token_shards import TokenShards
    from ...kernel.errors import printable
    from ...run.quoted import say

    problems = TokenShards(folder, 1).damaged()
    for problem in problems:
        say(problem, label="damaged:", style="bold red")
    if problems:
        raise typer.Exit(1)
    typer.echo(printable(f"{folder}: complete and unaltered"))
