"""KV of suspended rows in the host tier: what comes back is what went, or the row is computed again."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import logging
import os
import weakref

import psutil
import pytest
import torch

from batchgen_data import LLM, ConfigError, PlanError, SamplingParams
from batchgen_data.config import EngineConfig
from batchgen_data.models import kv_checkpoint
from batchgen_data.models.kv_checkpoint import KVCopies, host_page_bytes
from batchgen_data.models.kv_pool import KVPool, LayerShape
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Copy
from fake_model import sampling
from tiny_models import tiny_checkpoint

CPU = torch.device("cpu")
NUM_PAGES, PAGE_TOKENS = 12, 4
LAYOUTS = {
    "layers of different sizes": [(2, 8, 8), (2, 24, 12), (4, 8, 8)],
    "latents": [(1, 36, 0), (1, 36, 0)],
    "odd sizes": [(3, 5, 7), (1, 3, 1)],
}


def pool_of(shapes, dtype) -> KVPool:
    layers = {layer: LayerShape(*shape, dtype) for layer, shape in enumerate(shapes)}
    pool = KVPool(layers, NUM_PAGES, PAGE_TOKENS, CPU)
    generator = torch.Generator().manual_seed(3)
    for pages in (*pool.k.values(), *pool.v.values()):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return pool


def pages_of(pool, page_ids):
    return [pages[list(page_ids)].clone() for pages in (*pool.k.values(), *pool.v.values())]


def copy(to_host, device_pages, host_pages) -> Copy:
    owner = Sequence(0, [1], sampling(max_tokens=1), limit_tokens=2)
    return Copy(owner, to_host, device_pages, host_pages, 0, len(host_pages) * PAGE_TOKENS)


def finish(copies, *orders) -> dict[Copy, bool]:
    copies.start(orders)
    done: dict[Copy, bool] = {}
    while len(done) < len(orders):
        done |= copies.wait()
    return done


@pytest.fixture(params=["memory", "file"])
def host_path(request, tmp_path):
    return str(tmp_path) if request.param == "file" else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_come_back_as_they_went_wherever_they_are_put(shapes, dtype, host_path):
    pool = pool_of(shapes, dtype)
    copies = KVCopies(pool, 7, host_path=host_path)
    first, second = pages_of(pool, (3, 8, 1)), pages_of(pool, (0, 11))
    checkpoints = copy(True, (3, 8, 1), (6, 0, 2)), copy(True, (0, 11), (1, 5))
    assert finish(copies, *checkpoints) == dict.fromkeys(checkpoints, True)
    untouched = pages_of(pool, (4, 5))
    for pages in (*pool.k.values(), *pool.v.values()):
        pages[[3, 8, 1, 0, 11]] = float("nan")
    # One whole, elsewhere; of the other the last page only.
    restores = copy(False, (9, 10, 2), (6, 0, 2)), copy(False, (7,), (5,))
    assert finish(copies, *restores) == dict.fromkeys(restores, True)
    for got, want in zip(pages_of(pool, (9, 10, 2)), first, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(pages_of(pool, (7,)), second, strict=True):
        assert torch.equal(got[0], want[1])
    for got, want in zip(pages_of(pool, (4, 5)), untouched, strict=True):
        assert torch.equal(got, want)
    counts = copies.counts
    assert (counts.checkpoints, counts.restores) == (2, 2)
    assert counts.checkpoint_bytes == 5 * host_page_bytes(pool)
    assert counts.restore_bytes == 4 * host_page_bytes(pool)
    copies.close()


@pytest.mark.parametrize("failing", ["pwrite", "preadv"])
def test_a_disk_that_fails_is_reported_and_warned_of_once(failing, tmp_path, monkeypatch, caplog):
    pool = pool_of(LAYOUTS["odd sizes"], torch.float32)
    copies = KVCopies(pool, 4, host_path=str(tmp_path))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    there = copy(True, (1,), (0,))
    assert finish(copies, there)[there]
    monkeypatch.setattr(kv_checkpoint.os, failing, fail)
    orders = [copy(failing == "pwrite", (2,), (0,)) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        assert finish(copies, *orders) == dict.fromkeys(orders, False)
    assert len(caplog.records) == 1
    assert "Input/output error" in caplog.text
    monkeypatch.undo()
    again = copy(True, (1,), (0,)), copy(False, (3,), (0,))
    assert all(finish(copies, *again).values())
    assert torch.equal(pool.k[0][3], pool.k[0][1])
    copies.close()


def test_a_disk_that_returns_what_it_held_before_is_found_out(tmp_path):
    pool = pool_of(LAYOUTS["odd sizes"], torch.float32)
    copies = KVCopies(pool, 4, host_path=str(tmp_path))
    there = copy(True, (1, 2), (0, 3))
    assert finish(copies, there)[there]
    os.pwrite(copies._tier._file.fileno(), b"stale", host_page_bytes(pool) * 3)
    good, bad = copy(False, (5,), (0,)), copy(False, (6,), (3,))
    assert finish(copies, good, bad) == {good: True, bad: False}
    copies.close()


def test_a_file_may_be_written_and_read_in_pieces(tmp_path, monkeypatch):
    pool = pool_of(LAYOUTS["odd sizes"], torch.float32)
    copies = KVCopies(pool, 4, host_path=str(tmp_path))
    real_pwrite, real_preadv = os.pwrite, os.preadv
    monkeypatch.setattr(kv_checkpoint.os, "pwrite", lambda fd, data, at: real_pwrite(fd, data[:100], at))
    monkeypatch.setattr(kv_checkpoint.os, "preadv", lambda fd, to, at: real_preadv(fd, [to[0][:77]], at))
    orders = copy(True, (1, 2), (0, 3)), copy(False, (5, 6), (0, 3))
    assert all(finish(copies, *orders).values())
    for got, want in zip(pages_of(pool, (5, 6)), pages_of(pool, (1, 2)), strict=True):
        assert torch.equal(got, want)
    copies.close()


def test_a_closed_tier_gives_back_memory_file_and_thread(host_path):
    pool = pool_of(LAYOUTS["odd sizes"], torch.float32)
    num_files, num_threads = psutil.Process().num_fds(), psutil.Process().num_threads()
    copies = KVCopies(pool, 4, host_path=host_path)
    finish(copies, copy(True, (1,), (0,)))
    memory = weakref.ref(copies._tier._pairs[0][1].untyped_storage())
    assert host_path is None or os.listdir(host_path) == []
    copies.close()
    copies.close()
    del copies
    gc.collect()
    assert memory() is None
    assert psutil.Process().num_fds() == num_files
    assert psutil.Process().num_threads() == num_threads


# Through the whole runtime: twelve rows of about nine pages, a pool of twenty.

PROMPTS = ["the cat", "a dog and the other one", "x", "in the end of it all", "the cat sat on", "on and on"]
OPTIONS = {"num_threads": 1, "page_tokens": 4, "max_context_tokens": 256, "max_sequences": 16}
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.5, seed=11)
# mistral has a sliding window, of 16 tokens; deepseek_v3 keeps latents.
FAMILIES = ["llama", "mixtral", "deepseek_v3", "mistral"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = str(tiny_checkpoint(tmp_path_factory.mktemp(family), family, chat_template=False))
        return made[family]

    return of


def generate(folder, **options):
    """Six greedy and six drawn rows: their tokens, the statistics, the bytes of twenty pages."""
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        settings = [GREEDY] * len(PROMPTS) + [DRAWN] * len(PROMPTS)
        tokens = [outcome.token_ids for outcome in llm.generate(PROMPTS * 2, settings)]
        return tokens, llm.statistics(), 20 * host_page_bytes(llm._engine._executor.pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_and_fewer_are_prefilled(family, folder, tmp_path):
    want, roomy, kv_memory = generate(folder(family), kv_memory="4MiB")
    recomputed, before, _ = generate(folder(family), kv_memory=kv_memory)
    assert roomy["yields"] == 0
    assert before["yields"] > 2
    assert recomputed == want
    for where in ({}, {"host_path": str(tmp_path)}, {"prefix_reuse": False}):
        got, after, _ = generate(folder(family), kv_memory=kv_memory, host_memory="1MiB", **where)
        assert got == want, where
        assert after["yields"] > 2
        assert after["recomputed_tokens"] == 0
        assert after["prefill_tokens"] < before["prefill_tokens"]
        assert after["restored_tokens"] > 0
        assert after["host_pages_in_use"] == 0
        assert after["kv_copies"]["restores"] > 0
        assert after["kv_copies"]["restore_bytes"] > 0


def every_other_time(call):
    """`call`, but half of the calls fail."""
    count = itertools.count()

    def may_fail(*given):
        if next(count) % 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*given)

    return may_fail


def test_a_disk_that_fails_costs_computation_and_no_token(folder, tmp_path, monkeypatch, caplog):
    want, _, kv_memory = generate(folder("llama"), kv_memory="4MiB")
    host = {"kv_memory": kv_memory, "host_memory": "1MiB", "host_path": str(tmp_path)}
    for failing in ("pwrite", "preadv"):
        monkeypatch.setattr(kv_checkpoint.os, failing, every_other_time(getattr(os, failing)))
        caplog.clear()
        got, statistics, _ = generate(folder("llama"), **host)
        monkeypatch.undo()
        assert got == want
        assert statistics["failed_copies"] > 0
        assert statistics["recomputed_tokens"] > 0
        assert len([record for record in caplog.records if "KV pages failed" in record.message]) == 1


def test_sub_batches_and_lanes_go_on_beside_copies(folder):
    want, _, kv_memory = generate(folder("mixtral"), kv_memory="4MiB")
    for more in ({"attention_sub_batch": 2}, {"num_threads": 2}):
        got, statistics, _ = generate(folder("mixtral"), kv_memory=kv_memory, host_memory="1MiB", **more)
        assert got == want
        assert statistics["restored_tokens"] > 0


def test_the_trace_shows_copies_beside_passes(folder, tmp_path):
    path = tmp_path / "trace.json"
    _, statistics, _ = generate(
        folder("mixtral"), kv_memory="60KiB", host_memory="1MiB", attention_sub_batch=2, trace=str(path)
    )
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    copied = {name: [span for span in spans if span["name"] == name] for name in ("checkpoint", "restore")}
    for name, found in copied.items():
        assert sum(span["args"]["bytes"] for span in found) == statistics["kv_copies"][f"{name}_bytes"]
        assert len({span["tid"] for span in found}) == 1
        assert found
    assert {span["tid"] for span in spans if span["name"] == "pass"} != {copied["restore"][0]["tid"]}


def test_a_host_tier_too_small_for_two_pages_is_refused(folder):
    with pytest.raises(
        PlanError, match=r"a host tier of 4,096 bytes holds 1 pages.*set host_memory to at le"
    ):
        LLM(folder("llama"), **OPTIONS, kv_memory="1MiB", host_memory="4KiB")


def test_a_host_tier_is_no_larger_than_all_rows_at_their_longest(folder):
    with LLM(folder("llama"), **OPTIONS, kv_memory="1MiB", host_memory="1GiB") as llm:
        assert llm.statistics()["host_pages"] == 16 * 256 // 4


def test_a_folder_for_no_host_tier_is_refused():
    with pytest.raises(ConfigError, match="add host_memory"):
        EngineConfig(host_path="some/folder")
    EngineConfig(host_path="some/folder", host_memory="1GiB")
    EngineConfig(host_path="some/folder", kv_residence="host")
    EngineConfig(host_memory="1GiB")
