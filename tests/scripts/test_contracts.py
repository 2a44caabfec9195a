"""The check of a server's contracts finds each false statement."""

import pytest

from scripts.checks.contracts import SIZES, wrong

STATED = {"queue_seconds": 1.0, "run_seconds": 2.0, "steps": 10, "computed_steps": 6, "decided_by": "budget"}
ROW = {"status": 200, "begun": 0.0, "seconds": 3.1, "stages": {"denoising": 1.5}}
ROW |= {"fields": SIZES[0] | {"computed_steps": 6, "max_seconds": 3.5}, "contract": STATED | {"deadline_met": True}}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"steps": 9}, "steps"),
        ({"run_seconds": 2.2}, "seconds"),
        ({"computed_steps": 5}, "budget"),
        ({"decided_by": "floor"}, "decided_by"),
        ({"deadline_met": False}, "deadline_met"),
        ({"floor_met": True}, "floor_met"),
    ],
)
def test_a_false_statement_is_found(changes, name):
    found = wrong(ROW | {"contract": ROW["contract"] | changes}, [])
    assert [text.partition("}: ")[2].split(" of ")[0] for text in found] == ([name] if name else [])


def test_a_step_too_late_and_a_deadline_that_runs_kept_are_found():
    late = ROW | {"fields": ROW["fields"] | {"max_seconds": 2.7}}
    (found,) = wrong(late | {"contract": STATED | {"deadline_met": False}}, [])
    assert "a step too late" in found
    refused = late | {"status": 400, "begun": 9.0, "error": "max_seconds: must be at least 2.9 for this model and size"}
    assert len(wrong(refused, [ROW])) == 1 and wrong(refused | {"error": refused["error"].replace("2.9", "2.0")}, [ROW])
