"""Warnings that are taken aside of one thread, while others warn and replace the process's filters."""

import threading
import warnings

import pytest

from dit_accel.models.graphs.thread_warnings import taken_aside

BEGINNING = "called a synchronizing"


def elsewhere(job):
    thread = threading.Thread(target=job)
    thread.start(), thread.join()


def test_own_warnings_are_taken_and_others_are_shown():
    with pytest.warns(UserWarning) as shown, taken_aside(BEGINNING) as taken:
        warnings.warn(f"{BEGINNING} operation", UserWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [str(item.message) for item in shown] == ["another"]
    assert len(taken.places) == 1 and __file__ in taken.places[0] and taken.is_complete


@pytest.mark.parametrize("hides_others", [False, True])
def test_warnings_of_other_threads_are_theirs(hides_others):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with taken_aside(BEGINNING, hides_others=hides_others) as taken:
            elsewhere(lambda: warnings.warn(f"{BEGINNING} operation", UserWarning, stacklevel=1))
    assert len(shown) == (0 if hides_others else 1) and taken.places == []


def test_two_threads_take_their_own_at_a_time():
    """One that ends first takes nothing from the other."""
    both, ended, found = threading.Barrier(2), threading.Event(), {}

    def take(name, waits):
        with taken_aside(BEGINNING) as taken:
            both.wait(60)
            if waits:
                ended.wait(60)
            for _ in range(3):
                warnings.warn(f"{BEGINNING} operation of {name}", UserWarning, stacklevel=1)
        found[name] = taken
        ended.set()

    threads = [threading.Thread(target=take, args=item) for item in (("a", False), ("b", True))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: (len(taken.places), taken.is_complete) for name, taken in found.items()} == {
        "a": (3, True),
        "b": (3, True),
    }


def test_a_filter_that_another_thread_has_replaced_is_told():
    """The remark says that some warnings may be missing."""
    with taken_aside(BEGINNING) as taken:
        elsewhere(warnings.resetwarnings)
    assert not taken.is_complete


def test_an_error_passes_through_and_nothing_stays():
    before = len(warnings.filters)
    with pytest.raises(ValueError, match="mine"), taken_aside(BEGINNING):
        raise ValueError("mine")
    assert len(warnings.filters) == before
