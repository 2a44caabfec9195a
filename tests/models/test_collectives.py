"""Captures are cut at collectives, which keep their tensors' places; what two processes make of it is in
tests/test_parallel.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dit_accel.errors import UnsupportedError
from dit_accel.models.graphs.collectives import CutAtCollectives


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


COLLECTIVES = {
    "all-to-all": lambda x, group: functional.all_to_all_single(x, [6], [6], group),
    "all-to-all-in-equal-shares": lambda x, group: functional.all_to_all_single(x, None, None, group),
    "all-gather": lambda x, group: functional.all_gather_tensor(x, 0, group),
    "all-reduce": lambda x, group: functional.all_reduce(x, "sum", group),
    "several": lambda x, group: torch.cat(functional.all_reduce_coalesced([x[:2], x[2:]], "sum", group)),
}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
def test_collectives_run_when_they_are_told_to(group, collective):
    """A collective runs only on request, on the current content of the capture's tensors."""
    cut, x = [], torch.zeros(6, 3)
    with CutAtCollectives(cut.append):
        y = functional.wait_tensor(collective(x, group))
    assert type(y) is torch.Tensor and y.shape == x.shape and len(cut) == 1
    x.copy_(torch.randn(6, 3))
    cut[0].unowned().run()
    received = torch.cat(cut[0].output) if isinstance(cut[0].output, list) else cut[0].output
    assert torch.equal(received, x)
    assert isinstance(cut[0].output, list) or y.data_ptr() == received.data_ptr()


def test_a_result_that_nobody_has_waited_for_is_sent_on(group):
    cut = []
    with CutAtCollectives(cut.append):
        functional.all_to_all_single(functional.AsyncCollectiveTensor(torch.ones(4)), None, None, group)
    assert type(cut[0].arguments[0]) is torch.Tensor


@pytest.mark.parametrize(
    "in_place",
    [dist.all_reduce, lambda x: torch.ops._c10d_functional.all_reduce_(x, "sum", "0")],
    ids=["distributed", "functional"],
)
def test_collectives_in_place_are_refused_before_anything_is_sent(group, in_place):
    with CutAtCollectives(lambda _: pytest.fail("cut")), pytest.raises(UnsupportedError, match="can't be kept out"):
        in_place(torch.ones(2))
