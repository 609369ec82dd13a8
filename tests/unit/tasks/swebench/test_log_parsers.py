from __future__ import annotations

from ares_exp.tasks.swebench.log_parsers import LOG_PARSERS

PYTEST = """\
============================= test session starts ==============================
tests/test_a.py::test_old_style PASSED
tests/test_a.py .F                                                       [100%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_param[a b]
PASSED tests/test_a.py::test_path[/home/me/data/x.csv]
\x1b[32mPASSED\x1b[0m tests/test_a.py::test_green
SKIPPED [2] tests/test_a.py:10: not here
XFAIL tests/test_a.py::test_known - a reason
FAILED tests/test_a.py::test_two - assert 1 == 2
ERROR tests/test_b.py - ImportError: no module
PASSED
=================== 1 failed, 4 passed, 2 skipped in 0.03s =====================
"""


def test_pytest_whole_names() -> None:
    found = LOG_PARSERS["pytest"](PYTEST)
    assert found["tests/test_a.py::test_param[a b]"] == "PASSED"
    assert found["tests/test_a.py::test_green"] == "PASSED"
    assert found["tests/test_a.py::test_old_style"] == "PASSED"
    assert found["tests/test_a.py::test_two"] == "FAILED"
    assert not any("[2]" in name for name in found)


UNITTEST = """\
test_one (tests.T.test_one) ... ok
test_two (tests.T.test_two) ... FAIL
test_three (tests.T.test_three) ... ERROR
test_four (tests.T.test_four) ... skipped 'why'
test_five (tests.T.test_five) ... expected failure
test_six (tests.T.test_six) ... unexpected success
test_seven (tests.T.test_seven)
What it does ... ok
test_eight (tests.T.test_eight) ... printed by the test
ok
test_nine (tests.T.test_nine) ... printed, too
FAIL

======================================================================
FAIL: test_nine (tests.T.test_nine)
ERROR: tests.test_b (unittest.loader._FailedTest.tests.test_b)
FAIL:
Ran 9 tests in 0.001s
"""


def test_unittest() -> None:
    found = LOG_PARSERS["unittest"](UNITTEST)
    assert {name: status for name, status in found.items() if "(" in name} == {
        "test_one (tests.T.test_one)": "PASSED",
        "test_two (tests.T.test_two)": "FAILED",
        "test_three (tests.T.test_three)": "ERROR",
        "test_four (tests.T.test_four)": "SKIPPED",
        "test_five (tests.T.test_five)": "XFAIL",
        "test_six (tests.T.test_six)": "FAILED",
        "test_eight (tests.T.test_eight)": "PASSED",
        "test_nine (tests.T.test_nine)": "FAILED",
        "tests.test_b (unittest.loader._FailedTest.tests.test_b)": "ERROR",
    }
    assert found["What it does"] == "PASSED"


def test_nothing_makes_a_parser_fail() -> None:
    for log in (
        "",
        "\n",
        "PASSED",
        "FAIL:",
        "ERROR: ",
        " ... ",
        "ok",
        "\0\ud800 ... ok",
        "[" * 10**6,
        "_" * 10**6,
        " ... " * 10**5,
    ):
        for parse in LOG_PARSERS.values():
            assert isinstance(parse(log), dict)
