"""The table of changes that tests must notice is up to date, and the script reports the noticed ones."""

from dataclasses import replace

import pytest

from scripts.checks import mutants

TINY = "response-points-away"  # its nearest tests take a second


def why_not(mutant) -> str | None:
    """Return the reason why a change can't be made: its old text, the new file's syntax, or missing test files."""
    source = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    try:
        changed = mutant.of(source)
        compile(changed, mutant.file, "exec")
    except (ValueError, SyntaxError) as error:
        return str(error)
    if changed == source or not mutant.breaks:
        return "it changes or breaks nothing"
    return ", ".join(test for test in mutant.tests.split() if not (mutants.ROOT / test).is_file()) or None


def test_each_change_can_be_made():
    """Its old text is in the file once, the new file is valid Python, and its test files exist."""
    assert {mutant.name: reason for mutant in mutants.MUTANTS if (reason := why_not(mutant))} == {}


def test_changes_have_names_of_their_own():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 50


def test_a_change_that_a_test_notices_is_told(capfd):
    """The tests pass without it and fail with it, in a copy: the checkout stays as it is."""
    (mutant,) = (mutant for mutant in mutants.MUTANTS if mutant.name == TINY)
    file = mutants.ROOT / mutant.file
    before = file.read_bytes()
    assert mutants.main(["--only", TINY]) == 0
    assert f"| {TINY} | {mutant.file} | noticed | {mutant.breaks} |" in capfd.readouterr().out
    assert file.read_bytes() == before


def test_a_copy_is_restored_after_each_change(monkeypatch, tmp_path):
    (mutant,) = (mutant for mutant in mutants.MUTANTS if mutant.name == TINY)
    copy, seen = tmp_path / mutant.file, []
    copy.parent.mkdir(parents=True)
    copy.write_bytes((mutants.ROOT / mutant.file).read_bytes())

    def passing(tree, tests, limit):
        seen.append((tree / mutant.file).read_text(encoding="utf-8"))
        return mutants.PASSED, ""

    monkeypatch.setattr(mutants, "run_tests", passing)
    assert mutants.try_out(mutant, tmp_path) == mutants.PASSED
    assert seen == [mutant.of(copy.read_text(encoding="utf-8"))]
    assert copy.read_bytes() == (mutants.ROOT / mutant.file).read_bytes()


def test_tests_that_are_not_there_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"pytest nowhere\.py ended with 4"):
        mutants.run_tests(tmp_path, "nowhere.py")


@pytest.mark.parametrize("passed, code", [(1, 0), (2, 1)])
def test_nine_of_ten_must_be_noticed(monkeypatch, capsys, passed, code):
    """A timeout is not noticed; the table has the share of each folder."""
    names = [mutant.name for mutant in mutants.MUTANTS[:10]]
    outcomes = [mutants.TIMED_OUT, mutants.PASSED][:passed] + [mutants.NOTICED] * (10 - passed)
    monkeypatch.setattr(mutants, "try_all", lambda chosen, jobs: outcomes)
    assert mutants.main([part for name in names for part in ("--only", name)]) == code
    assert f"| all | 10 | {10 - passed}0% |" in capsys.readouterr().out


def test_a_text_that_occurs_twice_is_no_change():
    with pytest.raises(ValueError, match=r"old text must occur once in .*, got 2 times: 'a'"):
        replace(mutants.MUTANTS[0], old="a").of("a = a")
