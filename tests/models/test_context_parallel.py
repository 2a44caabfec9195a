"""Sequence sharing by several devices; runs of two processes are in tests/test_parallel.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dit_accel import accelerate_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.families import require_family
from dit_accel.models.families.family import Tokens
from dit_accel.models.parallel.context_parallel import (
    RING,
    Exchange,
    Exchanges,
    agreed,
    config_of,
    parallel_degree,
    shares_layers,
    split_plan,
)
from tests.tiny import tiny_output, tiny_pipeline


@pytest.fixture
def ranks(monkeypatch):
    """Says how many devices there are, of which this is the first and the one that measured most."""

    def are(count):
        monkeypatch.setattr(dist, "get_world_size", lambda _: count)
        monkeypatch.setattr(dist, "get_rank", lambda _: 0)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

    return are


def parallel(**degrees):
    """Attributes that diffusers sets on a transformer."""
    mesh = SimpleNamespace(get_group=lambda: None)
    return SimpleNamespace(context_parallel_config=SimpleNamespace(_flattened_mesh=mesh, **degrees))


@pytest.mark.parametrize("text_first", [True, False], ids=["text first", "text last"])
@pytest.mark.parametrize("order", [None, [4, 2, 0, 1, 3]], ids=["raster", "another order"])
def test_received_tokens_are_arranged(ranks, text_first, order):
    """Three devices with uneven shares of three text and five vision tokens: text in one piece, vision in its order."""
    ranks(3)
    shares = [(["t0"], ["v0", "v1"]), (["t1"], ["v2", "v3"]), (["t2"], ["v4"])]
    received = [token for text, vision in shares for token in (text + vision if text_first else vision + text)]
    vision = [f"v{i}" for i in order or range(5)]
    wanted = ["t0", "t1", "t2", *vision] if text_first else [*vision, "t0", "t1", "t2"]
    numbers = torch.tensor([wanted.index(token) for token in received])[None, :, None, None]
    permutation = None if order is None else torch.tensor(order)
    exchange = Exchange(None, Tokens(3, 5, text_first), permutation, torch.device("cpu"))
    assert exchange.arrange(numbers).flatten().tolist() == list(range(8))
    assert torch.equal(exchange.as_received(exchange.arrange(numbers)), numbers)
    assert exchange.divides(6) and not exchange.divides(4)


@pytest.mark.parametrize("head_dim, offset", [(8, 0), (6, 0), (8, 3)], ids=["words", "odd heads", "odd places"])
def test_tokens_come_back_whatever_their_memory(monkeypatch, head_dim, offset):
    """Reordered in pieces of 8 bytes where all of them have such; two devices, of which this one plays both."""
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(functional, "all_to_all_single", lambda send, *_: functional.AsyncCollectiveTensor(send))
    exchange = Exchange(None, Tokens(2, 4, text_first=True), None, torch.device("cpu"))
    memory = torch.randn(3, 4 * 3 * 4 * head_dim + offset).bfloat16()[:, offset:]
    tensors = [item.unflatten(0, (1, 12, 4, head_dim))[:, :3] for item in memory]
    q, k, v = exchange.to_heads(*tensors, arranged=False)
    assert q.shape == (1, 6, 2, head_dim) and q.dtype == torch.bfloat16
    for sent, received in zip(tensors, (q, k, v), strict=True):
        assert torch.equal(received[:, :3], sent[:, :, :2]) and torch.equal(received[:, 3:], sent[:, :, 2:])
        assert torch.equal(exchange.to_tokens(received, arranged=False), sent)


@pytest.mark.parametrize("known", [0.25, torch.inf], ids=str)
def test_ranks_agree_on_the_largest_error_and_what_is_no_number_is_larger(monkeypatch, known):
    """The result is the same on all ranks; devices reduce by comparison, which would lose NaN."""
    reductions = {dist.ReduceOp.MAX: torch.fmax, dist.ReduceOp.MIN: torch.fmin, dist.ReduceOp.SUM: torch.add}
    transformer = SimpleNamespace(_parallel_config=parallel())
    measured = [torch.tensor([0.5, 0.125, torch.nan, 0.0, torch.nan]), torch.tensor([0.25, 1.5, known, 0.0, torch.nan])]
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, *_, **__: sent.append(numbers.clone()))
    for original in measured:
        agreed(transformer, original.clone())

    def found_by(rank):
        def all_reduce(numbers, op=dist.ReduceOp.SUM, **_):
            numbers.copy_(reductions[op](numbers, sent[1 - rank]))

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        return agreed(transformer, measured[rank].clone()).tolist()

    assert found_by(0) == found_by(1) == [0.5, 1.5, torch.inf, 0.0, torch.inf]


def test_a_ring_leaves_no_tiles_out_and_says_so(ranks, pipe):
    ranks(2)
    pipe.transformer._parallel_config = parallel(ring_degree=2, ulysses_degree=1)
    accelerate_pipeline(pipe, "exact", skip={"policy": "sparge", "steps": "all", "tau_kv": 0.9}, blocks={"size": 64})
    tiny_output(pipe, "flux")
    report = pipe.dit_accel.report()
    assert report.computed_fraction == 1.0 and {item["reason"] for item in report.fallbacks} == {RING}


def test_the_degree_is_that_of_all_devices():
    """Ring and head-exchanging devices both count, because each has a share of the tokens."""
    assert parallel_degree(SimpleNamespace(_parallel_config=parallel(ring_degree=2, ulysses_degree=3))) == 6
    for alone in (SimpleNamespace(), SimpleNamespace(_parallel_config=None)):
        assert parallel_degree(alone) == 1 and config_of(alone) is None and not shares_layers(alone)
    assert shares_layers(SimpleNamespace(_parallel_config=SimpleNamespace(tensor_parallel_config=object())))
    numbers = torch.tensor([torch.nan])
    assert agreed(SimpleNamespace(), numbers) is numbers, "one device asks nobody"


def test_an_exchange_is_made_anew_where_anything_of_it_changes(ranks):
    """Tokens, their order, the device or the ranks; a ring has none."""
    ranks(2)
    config = SimpleNamespace(ring_degree=1, ulysses_degree=2, _ulysses_mesh=SimpleNamespace(get_group=lambda: None))
    transformer = SimpleNamespace(_parallel_config=SimpleNamespace(context_parallel_config=config))
    exchanges, cpu, meta = Exchanges(), torch.device("cpu"), torch.device("meta")
    first, second = torch.tensor([1, 0, 2, 3]), torch.tensor([3, 2, 1, 0])
    calls = [
        (Tokens(2, 4), None, cpu),
        (Tokens(2, 4), first, cpu),
        (Tokens(2, 4), second, cpu),
        (Tokens(2, 4, text_first=False), second, cpu),
        (Tokens(4, 4), second, cpu),
        (Tokens(4, 4), second, meta),
    ]
    seen = []
    for call in calls:
        seen.append(exchanges.of(transformer, *call))
        assert exchanges.of(transformer, *call) is seen[-1], "kept"
    assert len({*map(id, seen)}) == len(calls)
    transformer._parallel_config = SimpleNamespace(context_parallel_config=SimpleNamespace(**vars(config), other=1))
    assert exchanges.of(transformer, *calls[-1]) is not seen[-1]
    transformer._parallel_config.context_parallel_config.ring_degree = 2
    assert exchanges.of(transformer, *calls[0]) is None and exchanges.of(SimpleNamespace(), *calls[0]) is None


def test_a_plan_follows_from_a_familys_facts():
    """Input streams, tables and output; a class's own plan has priority."""
    transformer = copy.copy(tiny_pipeline("hunyuan").transformer)
    family = require_family(transformer)
    transformer._cp_plan = None
    plan, tables = split_plan(transformer, family), family.order.tables
    assert set(plan) == {family.split.entrance, family.split.exit, *tables}
    assert set(plan[family.split.entrance]) == {*family.split.streams}
    assert {(item.split_dim, item.expected_dims) for item in plan[family.split.entrance].values()} == {(1, 3)}
    assert plan[family.split.exit].gather_dim == 1
    for module, parts in tables.items():
        found = {place: (item.split_dim, item.split_output) for place, item in plan[module].items()}
        assert found == {place: (axis, True) for place, axis in parts.items()}
    transformer._cp_plan = original = {"": {}}
    assert split_plan(transformer, family) is original is split_plan(transformer, None)


def test_a_plan_is_refused_where_frames_are_told_by_their_place():
    transformer = copy.copy(tiny_pipeline("hunyuan-i2v").transformer)
    transformer._cp_plan = None
    with pytest.raises(UnsupportedError, match="run it on one device"):
        split_plan(transformer, require_family(transformer))
