"""Reports and the live page in a real browser: they run no text as code, and their numbers match the records.

One browser for all; skipped where there is no Chromium with its driver (`.ci/run` installs them).
"""

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ares_exp
from ares_exp.commands.cli.run_command import run_command
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.reports import page as page_of
from ares_exp.reports.written_report import episode_page
from ares_exp.runs.control.orders import Order, write_order
from ares_exp.runs.control.status import read_status
from ares_exp.trajectories.files.episode_file import dump_episode
from tests.browser.chromium import OWNED, Page, chromium, is_here
from tests.browser.hostile import IN_BROWSERS, PAYLOADS, hostile_run
from tests.unit.commands.recorded import row, run_of
from tests.unit.commands.served import served
from tests.unit.trajectories.chats import chat

compare = partial(run_command, "compare", program="ares-exp compare")

report = partial(run_command, "report", program="ares-exp report")

pytestmark = [
    pytest.mark.once,
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not is_here(), reason="a browser is not to be had here: chromium, chromium-driver, selenium"),
]
FIGURES = "return [...document.querySelector('.card').querySelectorAll('.figure')].map(one => +one.dataset.value)"
"""The numbers of the first card, as recorded."""
RUN_VIEWS = ("overview", "episodes", "tasks", "charts", "timeline", "config", "search?q=x")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        page.size(1280)
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one with snapshots, one whose replies solve nothing."""
    folder = tmp_path_factory.mktemp("runs")
    replies = "policy.replies=['```bash\nfalse\n```','```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```']"
    common = ["env.tasks=[write-greeting,count-records]", "attempts=2", "tracker=none", "wrapper=none"]
    ares_exp.run([*common, "snapshot=every_step", f"hydra.run.dir={folder / 'solved'}"])
    ares_exp.run([*common, "policy=scripted", replies, f"hydra.run.dir={folder / 'failed'}"])
    return folder


def opened(page: Page, out: Path, *runs: Path, options: tuple[str, ...] = ()) -> None:
    assert report([*map(str, runs), "-o", str(out), *options]) == 0
    page.open(out.as_uri())


def assert_quiet(page: Page, out: Path) -> None:
    """No console error, no violation of the policy, no request but for the file."""
    assert page.take_console() == []
    assert [one for one in page.take_requests() if not one.startswith("blob:")] in ([out.as_uri()], [])
    assert page.run(OWNED)


def test_every_run_view_opens_without_a_request(page: Page, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    opened(page, out, runs / "solved")
    for view in RUN_VIEWS:
        page.go(f"#/0/{view}")
        assert page.run("return document.querySelector('main').innerText.length") > 20, view
    for episode_id in page.run("return payload.runs[0].episodes.map(one => one.episode_id)"):
        page.go(f"#/0/e/{episode_id}@1")
        assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in page.text
        assert "reward.txt" in page.text or "reward.json" in page.text
        assert "changed since" in page.text
    assert_quiet(page, out)


def test_numbers_match_the_records(page: Page, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pair.html"
    opened(page, out, runs / "solved", runs / "failed")
    capsys.readouterr()
    assert compare([str(runs / "solved"), str(runs / "failed"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["pairs"][0]
    assert told["verdict"] in page.text
    assert page.run(FIGURES) == [told["errors_as_zero"][key] for key in ("value", "low", "high")]
    for number, name in enumerate(("solved", "failed")):
        recorded = json.loads((runs / name / "results.json").read_text())
        assert page.run("return payload.runs[arguments[0]].results", number) == recorded
        page.go(f"#/{number}/overview")
        estimate = recorded["statistics"]["scored_only"]["mean_reward"]
        assert page.run(FIGURES) == [estimate[key] for key in ("value", "low", "high")]
    page.go("#/compare")
    page.run("document.querySelector('[data-table=paired] tbody a').click()")
    page.until("return document.body.innerText.includes('in common, then')")
    assert_quiet(page, out)


def test_forty_hostile_texts_are_text(page: Page, tmp_path: Path) -> None:
    run, out = tmp_path / "hostile", tmp_path / "report.html"
    assert len(PAYLOADS) == 40
    hostile_run(run)
    opened(page, out, run, options=("--max-mb", "60"))
    assert page.run("return payload.runs[0].episodes.length") == 40
    for view in (*(f"#/0/{view}" for view in RUN_VIEWS), "#/branches"):
        page.go(view)
        page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        shown = page.run("return document.body.innerText")
        assert not set(IN_BROWSERS) & set(shown), view
    for number in range(40):  # half a pair cannot be sent to the browser: the page is asked for its own texts
        page.go(page.run(f"return episodeAddress(0, payload.runs[0].episodes[{number}].episode_id, null)"))
        assert page.run("return document.querySelectorAll('.step').length") == 3, PAYLOADS[number]
        page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        told = page.run("return document.body.innerText")
        assert not set(IN_BROWSERS) & set(told)
        text = page.run(f"return shown(payload.runs[0].episodes[{number}].note.replace(/\\x1b\\[\\d+m/g, ''))")
        assert " ".join(text.split()) in " ".join(told.split()), PAYLOADS[number]
    page.press("/")
    page.press("=HYPER")
    assert_quiet(page, out)


def test_keys_links_filters_and_themes_work(page: Page, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    opened(page, out, runs / "solved")
    page.press("e")
    page.until("return location.hash === '#/0/episodes' && document.querySelector('.cards') === null")
    page.press("/")
    page.press("task:greeting attempt=1")
    page.until("return document.querySelectorAll('[data-table=episodes] tbody tr').length === 1")
    page.run("document.activeElement.blur(); document.querySelector('[data-table=episodes] tbody a').click()")
    page.until("return document.querySelectorAll('.step').length === 3")
    page.press("j")
    page.until("return document.querySelector('.step.here').id === 'step-1'")
    linked = page.run("return location.href")
    assert linked.endswith("@1")
    page.open(linked)
    assert page.run("return document.querySelector('.step.here').id") == "step-1"
    page.press("d")
    assert page.run("return getComputedStyle(document.body).backgroundColor") in (
        "rgb(21, 25, 30)",
        "rgb(255, 255, 255)",
    )
    page.press("?")
    assert page.run("return document.querySelector('dialog').open")
    for width in (1280, 800, 390):
        page.size(width)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth + 1"), width
    page.size(1280)
    assert_quiet(page, out)


def test_causes_link_to_the_filtered_table(page: Page, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    refused = [ErrorInfo("PolicyError", f'The endpoint said "{number}".') for number in (500, 503)]
    limit = {"outcome": Outcome.TRUNCATED, "error": ErrorInfo.of_limit("steps")}
    rows = [row(f"task-{n}", attempt, 0.0, **limit) for n in range(500) for attempt in range(4)]
    rows += [row("a", n, None, outcome=Outcome.POLICY_ERROR, error=error) for n, error in enumerate(refused)]
    run = run_of(tmp_path / "run", [*rows, row("z", 0, 1.0)], chat("z-0", "z"))
    (run / "provenance.json").write_text(json.dumps({"argv": ["ares-exp", "seed=3"], "choices": {"env": "harbor"}}))
    opened(page, out, run)
    lines = page.run("return [...document.querySelectorAll('.causes li a')].map(one => one.innerText)")
    assert lines == ['2 × PolicyError: The endpoint said "500".', "2,000 × limit reached: steps"]
    assert page.run("return document.querySelector('.what').innerText.split(/\\s+/)")[:4] == [
        "env=harbor", "·", "attempts=1", "ares-exp",
    ]  # fmt: skip
    assert page.run("return document.querySelector('figure:nth-of-type(2) .name').textContent") == "z"  # the best first
    assert "task ↓" in page.run("return [...document.querySelectorAll('svg .axis')].map(one => one.textContent)")
    for width in (1280, 390):
        page.size(width)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth + 1"), width
        page.until(
            "return [...document.querySelectorAll('svg')].every(one => one.clientWidth >= +one.getAttribute('width'))"
        )
    page.size(1280)
    page.run("document.querySelector('.causes a').click()")
    page.until("return document.querySelector('.told').textContent === '2 of 2,003 episodes'")
    page.run(
        "const one = document.querySelector('.filter'); one.value = 'nonsense'; one.dispatchEvent(new Event('input'))"
    )
    assert "No episode matches this filter." in page.text
    page.go("#/0/search?q=solve")
    page.until("return / found in [\\d,]+ episode/.test(document.body.innerText)")
    assert_quiet(page, out)


def test_omitted_episodes_are_listed_with_their_command(page: Page, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    opened(page, out, runs / "solved", options=("--episodes", "failed"))
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.until("return document.body.innerText.includes('ares-exp show')")
    assert "4 trajectories left out" in page.text
    page.go(page.run("return episodeAddress(0, payload.runs[0].episodes[0].episode_id, null)"))
    assert "not included (--episodes failed)" in page.text
    assert_quiet(page, out)


def test_script_cannot_run_text_as_code() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser",
                 "createContextualFragment", "srcdoc", "setTimeout(\"", "importScripts"):  # fmt: skip
        assert word not in page_of.script()


def test_live_page_shows_new_steps(page: Page, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [row("done", 0, 1.0)])
    lines = [*dump_episode(chat("live-0", "live", length=8))]
    partial = run / "trajectories" / "live-0.json"
    partial.write_text("".join(lines[:3]))
    with served(tmp_path) as first:
        page.open(first)
        page.until("return location.search === '' && document.body.innerText.includes('run')")
        page.go("#/run/e/live-0")
        page.until("return document.querySelectorAll('.step').length === 2")
        refused = row("done", 0, None, outcome=Outcome.POLICY_ERROR, error=ErrorInfo("PolicyError", "refused"))
        run_of(tmp_path / "another", [refused])
        with partial.open("a") as file:
            file.write(lines[3])
        page.until("return document.querySelectorAll('.step').length === 3")
        page.go("#/runs")
        page.until("return document.querySelectorAll('[data-table=runs] tbody tr').length === 2")
        assert page.run("return document.querySelectorAll('.badge.state.failed').length") == 1  # not one is scored
        page.go("#/run/overview")  # it is the second one in the list now
        page.until("return document.querySelector('h2').firstChild.data === 'run'")
        hosts = {urlsplit(one).netloc for one in page.take_requests() if not one.startswith(("blob:", "data:"))}
        assert hosts == {urlsplit(first).netloc}
        assert page.take_console() == []
        page.driver.get("about:blank")


SLOW = """\
_target_: tests.slow_policy.SlowPolicy
delay_sec: 0.2
replies: ["```bash\\ntrue\\n```"]
repeat_last: true
"""


def test_page_follows_commands_to_a_run(page: Page, tmp_path: Path) -> None:
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "slow.yaml").write_text(SLOW)
    run = tmp_path / "runs" / "live"
    words = ["policy=slow", "env.tasks=[write-greeting]", "attempts=3", "container=local", "tracker=none"]
    words += ["limits.steps=10000", "concurrency=2", f"hydra.run.dir={run}"]
    arguments = {"config_dirs": [tmp_path / "conf"], "quiet": True}
    running = threading.Thread(target=ares_exp.run, args=(words,), kwargs=arguments)
    running.start()
    try:
        while (status := read_status(run / "status.json")) is None or not status.episodes:
            assert running.is_alive()
            time.sleep(0.02)
        with served(tmp_path / "runs") as first:
            page.open(first)
            page.until("return document.querySelector('[data-live=running]')")
            page.until("return /time\\s+[1-9][\\s\\S]*\\sETA/.test(document.querySelector('.cards').innerText)")
            assert page.run("return document.querySelector('.live button, .live input')") is None
            write_order(run / "control", Order.new("pause", now=True, reason="<b>lunch</b>"))
            page.until("return document.querySelector('.live').innerText.includes('wait: <b>lunch</b>')")
            write_order(run / "control", Order.new("resume"))
            write_order(run / "control", Order.new("set", values={"concurrency": 5}))
            page.until("return document.body.innerText.includes('of at most 5 episodes')")
            write_order(run / "control", Order.new("cancel", what=status.episodes[0].episode_id))
            page.until(
                "return ![...document.querySelectorAll('.live li a')].some(one => one.hash.includes(arguments[0]))",
                status.episodes[0].episode_id,
            )
            write_order(run / "control", Order.new("stop"))
            page.until("return document.querySelector('.badge.state').textContent === 'interrupted'")
            page.until("return document.querySelector('[data-live]') === null")
            assert page.take_console() == []
            assert page.run(OWNED)
            page.driver.get("about:blank")
    finally:
        write_order(run / "control", Order.new("stop"))
        running.join(60)


def test_page_of_one_episode_opens(page: Page, tmp_path: Path) -> None:
    out = tmp_path / "episode.html"
    out.write_text(episode_page(chat("one", "task", length=80)), encoding="utf-8")
    page.open(out.as_uri())
    assert page.run("return document.querySelectorAll('.step').length") == 50
    page.press("jjj")
    page.until("return document.querySelector('.step.here').id === 'step-3'")
    assert page.run("return document.querySelectorAll('nav.tabs a').length") == 0
    assert_quiet(page, out)
