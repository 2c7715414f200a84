# Each target sets up what it needs in .venv on first use; Python 3.11 or newer is all it takes.

.PHONY: demo test check bench clean

demo:            ## complete real text with a real model, Parquet to Parquet
	@scripts/setup
	@.venv/bin/python pipelines/demo.py

test:            ## lint, types and the whole suite: what CI runs
	@scripts/test

check:           ## lint and types only
	@scripts/check

bench:           ## the comparisons of docs/performance.md (about two hours on 2 cores)
	@scripts/bench

clean:
	rm -rf .venv demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
