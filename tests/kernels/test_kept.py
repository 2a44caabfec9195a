"""Tensors that are kept for later calls, while a CUDA graph is captured and while none is."""

import threading
import weakref

import torch

from dit_accel.kernels.kept import Kept, capturing, hold, is_capturing


def test_a_value_is_made_once_and_the_oldest_goes():
    kept, values = Kept(2), []
    for key in ("a", "b", "a", "c", "a"):
        kept.get(key, lambda key=key: values.append(key) or key)
    assert values == ["a", "b", "c", "a"]


def test_what_a_capture_makes_stays_with_the_capture():
    """It is undefined until the graph is replayed, so later calls must not read it; the capture makes it once."""
    kept = Kept(4)
    with capturing():
        assert is_capturing()
        first = kept.get("a", lambda: torch.zeros(1))
        assert kept.get("a", lambda: torch.ones(1)) is first
    assert not is_capturing()
    assert kept.get("a", lambda: torch.ones(1)).item() == 1


def test_caches_of_a_capture_share_no_keys():
    first, second = Kept(4), Kept(4)
    with capturing():
        values = [kept.get("a", lambda: torch.zeros(1)) for kept in (first, second)]
        assert values[0] is not values[1] and all(
            kept.get("a", list) is value for kept, value in zip((first, second), values, strict=True)
        )


def test_what_a_capture_reads_lives_as_long_as_the_capture():
    """Even if the cache drops it in the meantime."""
    kept = Kept(1)
    kept.get("a", lambda: torch.ones(1))
    with capturing() as capture:
        place = weakref.ref(kept.get("a", lambda: torch.zeros(1)))
        other = weakref.ref(hold(torch.ones(1)))
    kept.get("b", lambda: torch.ones(1))
    assert place() is not None and other() is not None
    del capture
    assert place() is None and other() is None


def test_a_capture_is_of_its_thread():
    found = []
    with capturing():
        thread = threading.Thread(target=lambda: found.append(is_capturing()))
        thread.start(), thread.join()
    assert found == [False]


def test_a_capture_within_another_ends_alone():
    kept = Kept(4)
    with capturing() as outer:
        mine = kept.get("a", lambda: torch.zeros(1))
        with capturing() as inner:
            assert kept.get("a", lambda: torch.ones(1)) is not mine
        assert kept.get("a", lambda: torch.ones(1)) is mine
    assert outer.results.keys() == inner.results.keys()
