"""The command line: ``batchgen run``, ``preview``, ``plan``, ``status`` and ``verify``.

Exit codes: 0 every row is accounted for without an error (rows may be skipped), 3 finished with row errors,
4 more rows failed than allowed, 2 bad options or files, or an output of another job, found before anything
ran, 1 failed (run again to go on), 130 interrupted (run again to go on).
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen_data import __version__
from batchgen_data.cli_options import Inputs, PlanOptions, PreviewOptions, RunOptions, SharedOptions
from batchgen_data.config import EngineConfig
from batchgen_data.errors import (
    BatchgenError,
    ConfigError,
    ErrorBudgetExceeded,
    ResumeMismatchError,
    nearest,
)
from batchgen_data.job.check import CheckedJob, JobConfig, check_job
from batchgen_data.job.summary import RunSummary
from batchgen_data.sampling import SamplingParams

EXIT_FAILED, EXIT_CONFIG, EXIT_ROW_ERRORS, EXIT_BUDGET, EXIT_INTERRUPTED = 1, 2, 3, 4, 130

# typer carries its own copy of click in some versions and uses the installed one in others.
_UsageError: Any = typer.BadParameter.__mro__[1]

_CONTROL_MARKS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}

app = typer.Typer(add_completion=False)


class _Interrupted(Exception):
    """Ctrl-C or SIGTERM stopped a command; the text says what is left of it."""


def _command(options: type[SharedOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``(inputs, options)`` one parameter per field of `options`, for typer to read."""
    hints = inspect.get_annotations(SharedOptions, eval_str=True)
    if options is not SharedOptions:
        hints = {**hints, **inspect.get_annotations(options, eval_str=True)}

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def command(inputs: list[str] | None = None, **given: Any) -> None:
            try:
                body(inputs or [], options(**given))
            except KeyboardInterrupt as error:
                # typer would end the process by itself, without a word.
                writes = options is RunOptions
                left = "; finished rows are kept: run the same command to go on" if writes else ""
                raise _Interrupted(f"interrupted{left}") from error

        parameters = []
        if options is not PlanOptions:
            parameters.append(inspect.Parameter("inputs", inspect.Parameter.KEYWORD_ONLY, annotation=Inputs))
        for field in fields(options):
            default = {} if field.default is field.default_factory else {"default": field.default}
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], **default
                )
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return app.command(body.__name__.strip("_"), help=inspect.getdoc(body))(command)

    return decorate


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Complete the rows of Parquet files with a language model."""
    if version:
        typer.echo(f"batchgen {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_command(RunOptions)
def _run(inputs: list[str], options: RunOptions) -> None:
    """Complete every row of IN into Parquet files in OUT/data and OUT/errors; run again to go on."""
    from batchgen_data.job.progress import ProgressDisplay
    from batchgen_data.job.run import run_job

    errors = Console(stderr=True)
    config = _job_config(inputs, options)

    summary = run_job(
        config,
        display=ProgressDisplay(errors),
        on_checked=lambda job: _note_ignored(job, errors),
        on_opened=lambda output: print_line(errors, output.announcement),
    )
    print_summary(Console(), summary, options.output)
    if summary.num_failed:
        raise typer.Exit(EXIT_ROW_ERRORS)


_Output = Annotated[str, typer.Argument(metavar="OUT", help="The output folder of a run.")]


@app.command("status")
def _status(output: _Output) -> None:
    """Show how far the job in OUT is: progress, failures, tokens."""
    from batchgen_data.job.output import output_path
    from batchgen_data.job.status import read_status

    status = read_status(output_path(output))
    console = Console()
    for line in status.lines():
        print_line(console, line)
    print_summary(console, status.summary, output)


@app.command("verify")
def _verify(output: _Output) -> None:
    """Read everything in OUT again: are all rows there, once, and undamaged?"""
    from batchgen_data.job.output import output_path
    from batchgen_data.job.verify import verify_output

    report = verify_output(output_path(output))
    console = Console()
    for line in report.lines():
        print_line(console, line)
    if report.problems:
        raise typer.Exit(EXIT_FAILED)


@_command(PreviewOptions)
def _preview(inputs: list[str], options: PreviewOptions) -> None:
    """Show the prompts of the first rows of IN as the model sees them, and their completions."""
    from batchgen_data.job.preview import preview_rows

    errors = Console(stderr=True)
    job = check_job(_job_config(inputs, options))
    _note_ignored(job, errors)
    console = Console()
    num_failed = 0
    for row in preview_rows(job):
        num_failed += row.finish_reason == "error"
        # A rule cuts a long title at its end, where the row is.
        most = console.width - 4
        location = row.location if len(row.location) <= most else "…" + row.location[1 - most :]
        console.rule(Text(location), align="left")
        print_line(console, row.prompt if row.prompt is not None else "(no prompt)", style="dim")
        if row.text is not None:
            print_line(console, row.text, style="bold")
            print_line(console, f"[{row.finish_reason}, {row.num_generated_tokens} tokens]")
        else:
            print_line(console, f"[{row.finish_reason}: {row.error_code}] {row.error_message}")
    if num_failed:
        raise typer.Exit(EXIT_ROW_ERRORS)


@_command(PlanOptions)
def _plan(inputs: list[str], options: PlanOptions) -> None:
    """Choose batch sizes and where weights and KV live, and predict what they give; nothing is generated.

    The model is measured on this machine once; later plans and runs use what was kept.
    """
    from batchgen_data.job.plan import plan_job, plan_lines, plan_record

    errors = Console(stderr=True)
    # What a run would refuse without KV in the host tier is a budget here.
    config = _job_config(options.input or [], replace(options, host_memory=None))
    advice = plan_job(
        config,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        notify=lambda what: print_line(errors, f"measuring: {what}", style="dim"),
    )
    console = Console()
    if options.json:
        console.out(json.dumps(plan_record(advice), indent=1), highlight=False)
        return
    for line in plan_lines(advice):
        print_line(console, line)
    if options.explain:
        print_line(console, "\n" + advice.explain())


def _job_config(inputs: list[str], options: SharedOptions) -> JobConfig:
    engine_names = [field.name for field in fields(EngineConfig)]
    # Options of one name in both places mean the same; the rest is translated below.
    given = {
        field.name: getattr(options, field.name)
        for field in fields(JobConfig)
        if hasattr(options, field.name) and field.name != "sampling"
    }
    if options.chat_template_kwargs is not None:
        given["chat_template_kwargs"] = _json_object("--chat-template-kwargs", options.chat_template_kwargs)
    if isinstance(options, PreviewOptions):
        given["limit"] = options.num_rows
    return JobConfig(
        inputs=tuple(inputs),
        apply_chat_template=not options.raw,
        sampling=_sampling(options),
        # typer gives an empty list for a repeatable option that is not there.
        engine={
            name: value for name in engine_names if (value := getattr(options, name, None)) not in (None, [])
        },
        **given,
    )


def _sampling(options: SharedOptions) -> SamplingParams:
    """Return the settings of --sampling with those of single options laid over them."""
    single: dict[str, Any] = {
        field.name: getattr(options, field.name, None) for field in fields(SamplingParams)
    }
    # typer gives an empty list for a repeatable option that is not there.
    single = {name: value for name, value in single.items() if value is not None and value != []}
    if "logit_bias" in single:
        single["logit_bias"] = _json_object("--logit-bias", single["logit_bias"])
    if options.sampling is None:
        return SamplingParams.from_dict(single)
    base = SamplingParams.from_dict(_json_object("--sampling", options.sampling))
    return SamplingParams.from_dict(single).over(base)


_JSON_EXAMPLES = {
    "--sampling": '{"temperature": 0.7}',
    "--logit-bias": '{"50256": -100}',
    "--chat-template-kwargs": '{"enable_thinking": false}',
}


def _json_object(option: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{option} must be a JSON object such as {_JSON_EXAMPLES[option]}")
    return parsed


def print_summary(console: Console, summary: RunSummary, output: str) -> None:
    """Print what became of the rows; the counts add up.

    Args:
        console: Where to.
        summary: The counts.
        output: The output folder, as the caller named it.
    """
    from batchgen_data.job.filesystem import without_credentials
    from batchgen_data.job.progress import duration

    print_line(
        console,
        f"{summary.num_rows} rows = {summary.num_ok} ok ({summary.num_stop} stop, "
        f"{summary.num_length} length) + {summary.num_failed} failed + {summary.num_skipped} skipped",
    )
    for title, causes in (("failed", summary.failures), ("skipped", summary.skips)):
        if causes:
            table = Table(title, "rows", "first at", "why", box=None, pad_edge=False)
            for code, cause in sorted(causes.items()):
                cells = (code, str(cause.count), cause.location, cause.message)
                table.add_row(*(Text(_printable(cell)) for cell in cells))
            console.print(table)
    print_line(
        console,
        f"{summary.input_tokens} prompt tokens, {summary.generated_tokens} generated tokens, "
        f"{summary.tokens_per_s:.1f} generated tokens/s, {duration(summary.elapsed_s)} in all",
    )
    if summary.run_retries:
        print_line(console, f"{summary.run_retries} calls raised and were made again")
    if summary.run_yields:
        print_line(
            console,
            f"KV memory was short: rows were suspended {summary.run_yields} times and "
            f"{summary.run_recomputed_tokens} tokens computed again; raise kv_memory, keep what suspended "
            "rows computed (host_memory), or run fewer rows at once (max_sequences)",
        )
    print_line(console, f"results: {without_credentials(output).rstrip('/')}/data")


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print text as it is: no markup, no wrapping by the console; control characters show as marks."""
    console.print(Text(_printable(text)), style=style, soft_wrap=True)


def _printable(text: str) -> str:
    """Mark control characters: text of rows, models and files may hold escape sequences."""
    return text.translate(_CONTROL_MARKS)


def _note_ignored(job: CheckedJob, console: Console) -> None:
    if job.ignored:
        shown = ", ".join(job.ignored[:3]) + (", ..." if len(job.ignored) > 3 else "")
        print_line(console, f"note: passed over {len(job.ignored)} files that are no data files: {shown}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: What follows the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments, prog_name="batchgen", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        return _report(error, _usage_message(error), EXIT_CONFIG, arguments)
    except (ConfigError, ResumeMismatchError) as error:
        return _report(error, str(error), EXIT_CONFIG, arguments)
    except ErrorBudgetExceeded as error:
        return _report(error, str(error), EXIT_BUDGET, arguments)
    except BatchgenError as error:
        return _report(error, str(error), EXIT_FAILED, arguments)
    except (_Interrupted, KeyboardInterrupt, typer.Abort) as error:
        return _report(error, str(error) or "interrupted", EXIT_INTERRUPTED, arguments)
    except Exception as error:
        message = f"{type(error).__name__}: {error} (a bug; run with --debug and report it)"
        return _report(error, message, EXIT_FAILED, arguments)


def _usage_message(error: Any) -> str:
    if not hasattr(error, "possibilities"):  # all but an unknown option
        return str(error.format_message()).strip().rstrip(".")
    # click's own suggestions differ between its versions.
    known = [option for parameter in error.ctx.command.params for option in parameter.opts]
    return str(error.message).strip().rstrip(".") + nearest(error.option_name, known)


def _report(error: BaseException, message: str, code: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exception(error)
    print(f"error: {_printable(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
