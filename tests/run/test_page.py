"""The page that a run keeps: when it is made, by which process, and what becomes of one that cannot
be made.
"""

import pytest

from shardwright.run import page as pages
from shardwright.run.page import Page
from tests.support.written_runs import write_run


@pytest.fixture
def made(monkeypatch):
    """In place of the program that makes the page: what it is asked for in `calls`, on a clock
    `now`.
    """
    calls, now = [], [1000.0]
    seconds = {0: 1, 1: 1, 2: 9}  # that the first pages take

    def make(*arguments, **options):
        calls.append((now[0], arguments, options))
        now[0] += seconds.get(len(calls) - 1, 1)

    monkeypatch.setattr(pages.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pages, "run_beside", make)
    make.now, make.calls = now, calls
    return make


@pytest.mark.long
def test_the_last_page_is_waited_for(tmp_path, capsys):
    run = write_run(tmp_path / "a 'run', [of] {mine}=é, $x")
    (run / "json.py").write_text("raise SystemExit('not this one')")
    page = Page(run, wanted=True)
    assert page.finish() == run / "report.html"
    assert "It is a truth" in (run / "report.html").read_text()
    assert capsys.readouterr().out == ""
    (run / "report.html").write_text("")
    assert Page(run, wanted=False).finish() is None
    assert (run / "report.html").read_text() == ""


def test_pages_are_a_minute_apart_and_take_a_share_of_the_time(tmp_path, made):
    page = Page(tmp_path, wanted=True)
    for _ in range(600):
        page.refresh()
        page.close()
        made.now[0] += 1
    # The third took nine seconds: 30 times as long until the next one.
    assert [start for start, *_ in made.calls] == [1010, 1070, 1130, 1400, 1460, 1520, 1580]
    assert made.calls[0][2] == {"directory": tmp_path, "nice": 19}
