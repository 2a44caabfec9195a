"""The cases of :func:`tests.pairs.every_pair` leave out no pair of values."""

import itertools

from tests.pairs import every_pair


def test_each_value_meets_each_other():
    """Three axes of 4, 3 and 2 values have 24 combinations; 12 to 14 hold all pairs but the excluded one."""
    axes = {"a": range(4), "b": range(3), "c": {"yes": True, "no": False}}
    mark = every_pair(excluded=lambda case: case["a"] == 3 and case["c"], **axes)
    cases = [case.values for case in mark.args[1]]
    assert 12 <= len(cases) <= 14 and mark.args[0] == ("a", "b", "c")
    assert mark.args[1][0].id == "0-0-yes"
    for (i, one), (j, other) in itertools.combinations(enumerate([range(4), range(3), (True, False)]), 2):
        wanted = set(itertools.product(one, other)) - ({(3, True)} if (i, j) == (0, 2) else set())
        assert {(case[i], case[j]) for case in cases} == wanted
