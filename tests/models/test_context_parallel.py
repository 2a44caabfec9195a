"""How several devices share a sequence; what two processes make of it is in tests/test_parallel.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dit_accel import accelerate_pipeline
from dit_accel.models.context_parallel import RING, Exchange, Exchanges, agreed
from dit_accel.models.family import Tokens
from dit_accel.models.family_driver import FamilyDriver
from dit_accel.tools.testing import tiny_output, tiny_pipeline


@pytest.fixture
def ranks(monkeypatch):
    """Says how many devices there are, of which this is the first and the one that measured most."""

    def are(count):
        monkeypatch.setattr(dist, "get_world_size", lambda _: count)
        monkeypatch.setattr(dist, "get_rank", lambda _: 0)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

    return are


def parallel(**degrees):
    """What diffusers leaves at a transformer."""
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


def test_a_call_exchanges_tokens_in_its_own_order(ranks):
    """The exchange of a call is kept for the next over the same tokens, and for no others or another order of them."""
    ranks(2)
    mesh = SimpleNamespace(get_group=lambda: None)
    config = SimpleNamespace(_ulysses_mesh=mesh, ring_degree=1, ulysses_degree=2)
    transformer = SimpleNamespace(_parallel_config=SimpleNamespace(context_parallel_config=config))
    exchanges, orders = Exchanges(), [None, torch.tensor([3, 1, 0, 2]), torch.tensor([2, 3, 1, 0])]
    tokens = Tokens(2, 4, text_first=True)
    for order in (*orders, *orders):
        exchange = exchanges.of(transformer, tokens, order, torch.device("cpu"))
        fresh = Exchange(None, tokens, order, torch.device("cpu"))
        numbers = torch.arange(6)[None]
        assert torch.equal(exchange.arrange(numbers), fresh.arrange(numbers))
        assert exchanges.of(transformer, tokens, order, torch.device("cpu")) is exchange
    longer = exchanges.of(transformer, Tokens(3, 4, text_first=True), orders[-1], torch.device("cpu"))
    assert longer.arrange(torch.arange(7)[None]).shape == (1, 7)


@pytest.mark.parametrize("head_dim, offset", [(8, 0), (6, 0), (8, 3)], ids=["words", "odd heads", "odd places"])
def test_tokens_come_back_whatever_their_memory(monkeypatch, head_dim, offset):
    """Reordered in pieces of 8 bytes where all of them have such; two devices, of which this one plays both."""
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(functional, "all_to_all_single", lambda send, *_: functional.AsyncCollectiveTensor(send))
    exchange = Exchange(None, Tokens(2, 4, text_first=True), None, torch.device("cpu"))
    memory = torch.randn(3, 4 * 3 * 4 * head_dim + offset).bfloat16()[:, offset:]
    tensors = [each.unflatten(0, (1, 12, 4, head_dim))[:, :3] for each in memory]
    q, k, v = exchange.to_heads(*tensors, arranged=False)
    assert q.shape == (1, 6, 2, head_dim) and q.dtype == torch.bfloat16
    for sent, received in zip(tensors, (q, k, v), strict=True):
        assert torch.equal(received[:, :3], sent[:, :, :2]) and torch.equal(received[:, 3:], sent[:, :, 2:])
        assert torch.equal(exchange.to_tokens(received, arranged=False), sent)


@pytest.mark.parametrize("known", [0.25, torch.inf], ids=str)
def test_ranks_agree_on_the_largest_error_and_what_is_no_number_is_larger(monkeypatch, known):
    """Whichever rank measured it; devices reduce by comparison, in which what is no number would be lost."""
    reductions = {dist.ReduceOp.MAX: torch.fmax, dist.ReduceOp.MIN: torch.fmin, dist.ReduceOp.SUM: torch.add}
    transformer = SimpleNamespace(_parallel_config=parallel())
    measured = [torch.tensor([0.5, 0.125, torch.nan, 0.0, torch.nan]), torch.tensor([0.25, 1.5, known, 0.0, torch.nan])]
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, *_, **__: sent.append(numbers.clone()))
    for own in measured:
        agreed(transformer, own.clone())

    def found_by(rank):
        def all_reduce(numbers, op=dist.ReduceOp.SUM, **_):
            numbers.copy_(reductions[op](numbers, sent[1 - rank]))

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        return agreed(transformer, measured[rank].clone()).tolist()

    assert found_by(0) == found_by(1) == [0.5, 1.5, torch.inf, 0.0, torch.inf]


def test_a_device_alone_keeps_what_it_measured(monkeypatch):
    """It asks nobody, and what is no number stays so."""
    monkeypatch.setattr(dist, "all_reduce", None)
    numbers = torch.tensor([0.5, torch.nan])
    assert agreed(SimpleNamespace(), numbers) is numbers


@pytest.mark.parametrize("count", [2, 3])
def test_devices_expect_shares_that_make_up_what_one_expects(monkeypatch, count):
    """Of what blocks remember, features and symbols, each device of a group holds its part."""
    asked, size = [], FamilyDriver.size
    monkeypatch.setattr(FamilyDriver, "size", lambda *call: asked.append(call) or size(*call))
    skip = {"policy": "sparge", "steps": "all", "tau_kv": 0.9}
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", skip=skip, blocks={"size": 64})
    tiny_output(pipe, "flux", steps=2)
    alone = size(*asked[0])
    pipe.transformer._parallel_config = parallel(ring_degree=1, ulysses_degree=count)
    share = size(*asked[0])
    assert 0 <= alone.symbols - count * share.symbols < count and share.symbols > 0
    assert 0 <= alone.width - count * share.width < count
    assert (share.output, share.layout) == (alone.output, alone.layout)


def test_a_ring_leaves_no_tiles_out_and_says_so(ranks):
    ranks(2)
    pipe = tiny_pipeline("flux")
    pipe.transformer._parallel_config = parallel(ring_degree=2, ulysses_degree=1)
    skip = {"policy": "sparge", "steps": "all", "tau_kv": 0.9}
    accelerate_pipeline(pipe, "exact", skip=skip, blocks={"size": 64})
    tiny_output(pipe, "flux")
    report = pipe.dit_accel.report()
    assert report.computed_fraction == 1.0
    assert {each["reason"] for each in report.fallbacks} == {RING}
