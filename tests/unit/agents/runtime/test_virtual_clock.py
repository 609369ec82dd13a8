import random
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from ares_exp.agents.runtime.virtual_clock import VirtualClockAndRandom

THEN = 1_000_000_000.0
"""In 2001: nobody's real clock says that."""

REAL = (time.time, time.monotonic, time.strftime, random.random, random.seed, uuid.uuid4)


def now_there() -> tuple[object, ...]:
    return time.time, time.monotonic, time.strftime, random.random, random.seed, uuid.uuid4


def clock_and_random(seed: int = 1, now: float = 5.0) -> VirtualClockAndRandom:
    return VirtualClockAndRandom(seed=seed, started_at=THEN, now=now)


def test_clock_is_virtual() -> None:
    with clock_and_random():
        assert time.time() == THEN + 5
        assert time.time_ns() == int((THEN + 5) * 1e9)
        assert (time.monotonic(), time.perf_counter(), time.monotonic_ns()) == (5.0, 5.0, 5_000_000_000)
        assert time.gmtime() == time.gmtime(THEN + 5)
        assert time.localtime() == time.localtime(THEN + 5)
        assert (time.ctime(), time.asctime()) == (time.ctime(THEN + 5), time.asctime(time.localtime(THEN + 5)))
        assert (time.strftime("%Y"), time.strftime("%Y", time.gmtime(0))) == ("2001", "1970")
        assert (time.gmtime(0).tm_year, time.ctime(0)[-4:]) == (1970, "1970")
    assert now_there() == REAL


def test_random_numbers_follow_the_seed() -> None:
    def draw(seed: int) -> list[object]:
        with clock_and_random(seed):
            drawn = [random.random(), random.choice(range(99)), random.sample(range(99), 4), random.gauss(0, 1)]
            return [*drawn, random.getstate()[1], uuid.uuid4(), uuid.uuid1()]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    with clock_and_random():
        random.seed(3)
        assert random.random() == random.Random(3).random()
        assert (uuid.uuid4().version, uuid.uuid1().version) == (4, 1)


def test_global_random_state_is_unchanged() -> None:
    before = random.getstate()
    with clock_and_random():
        random.random()
        random.seed(1)
    assert random.getstate() == before
    with pytest.raises(KeyError), clock_and_random():
        raise KeyError
    assert now_there() == REAL


def test_monkeypatched_functions_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = clock_and_random()
    monkeypatch.setattr(time, "time", lambda: 7.0)
    monkeypatch.setattr(random, "random", lambda: 0.25)
    with frozen:
        assert time.time() == THEN + 5
        assert random.random() != 0.25
    assert (time.time(), random.random()) == (7.0, 0.25)
    monkeypatch.undo()
    with frozen:
        assert time.time() == THEN + 5
    assert now_there() == REAL


def test_virtual_clocks_can_be_nested() -> None:
    with clock_and_random():
        with clock_and_random(2, now=9.0):
            assert time.monotonic() == 9.0
        assert time.monotonic() == 5.0
        assert random.random() == random.Random(1).random()
    assert now_there() == REAL


def test_other_threads_see_the_real_clock() -> None:
    def look() -> tuple[float, float, str]:
        random.seed(11)
        return time.time(), random.random(), time.strftime("%Y")

    before = REAL[0]()
    with ThreadPoolExecutor(1) as other, clock_and_random():
        seen, drawn, year = other.submit(look).result(timeout=20)
        mine = time.time(), time.strftime("%Y")
    assert before <= seen <= REAL[0]()
    assert drawn == random.Random(11).random()
    assert year != "2001"
    assert mine == (THEN + 5, "2001")


def test_agents_in_threads_are_independent() -> None:
    started = threading.Barrier(4)

    def work(number: int) -> list[float]:
        own, drawn = clock_and_random(number, now=float(number)), []
        started.wait(20)
        for _ in range(300):
            with own:
                assert time.monotonic() == number
                drawn.append(random.random())
            assert time.time() > THEN + 10_000_000
        return drawn

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            drawn = list(threads.map(work, range(4), timeout=60))
    finally:
        sys.setswitchinterval(interval)
    for number in range(4):
        expected = random.Random(number)
        assert drawn[number] == [expected.random() for _ in range(300)]
    assert now_there() == REAL


FORKS = """
import os, sys, threading, time
from ares_exp.agents.runtime.virtual_clock import VirtualClockAndRandom
own = VirtualClockAndRandom(seed=1, started_at=1e9, now=5.0)
ended = threading.Event()
real = time.time
def busy():
    other = VirtualClockAndRandom(seed=2, started_at=1e9, now=6.0)
    while not ended.is_set():
        with other:
            sum(range(200))
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
with own:
    pass
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        with own:
            inside = time.time()
        os._exit(0 if inside == 1e9 + 5 and time.time is real else 1)
    assert os.waitpid(pid, 0)[1] == 0
with own:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if time.time() == 1e9 + 5 else 1)
    assert os.waitpid(pid, 0)[1] == 0
ended.set()
"""


def test_forked_process_inherits_the_virtual_clock() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
