# Each target sets up what it needs in .venv on first use; Python 3.11 or newer is all it takes.

.PHONY: demo test check crash crash-long bench clean

demo:            ## complete real text with a real model, Parquet to Parquet
	@scripts/setup
	@.venv/bin/python pipelines/demo.py

test:            ## lint, types and the whole suite: what CI runs
	@scripts/test

check:           ## lint and types only
	@scripts/check

crash:           ## kill a job 200 times at random and at every change on disk (about 4 minutes)
	@scripts/setup
	@.venv/bin/python tests/crash/bench.py --kills 200 --every-step --races 50

crash-long:      ## the same with 2,000 random kills
	@scripts/setup
	@.venv/bin/python tests/crash/bench.py --kills 2000 --every-step --races 50

bench:           ## the comparisons of docs/performance.md (about three hours on 2 cores; larger_than_memory needs root)
	@scripts/bench

clean:
	rm -rf .venv demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
