"""The log of requests: ids, a line of JSON for each, and spans."""

import json
import logging

import pytest

from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker import Worker
from tests.serving.http.test_server import GOOD, PATH, Held, events, metric, post, released, running, send
from tests.serving.http.test_videos import ask, ended

log = pytest.importorskip("dit_accel.serving.http.log")
trace = pytest.importorskip("opentelemetry.trace")


@pytest.fixture
def lines(caplog, monkeypatch):
    """Returns the lines of the log so far, as `--log-json` writes them."""
    monkeypatch.setattr(caplog.handler, "formatter", log.JsonLines())
    caplog.set_level(logging.INFO, logger="dit_accel.serving")
    return lambda: [json.loads(line) for line in caplog.text.splitlines()]


@pytest.mark.parametrize("sent", ["abc-1:2.3_4", "a" * 129, "a b", 'a"}', ""], ids=range(5))
def test_a_request_has_an_id(sent):
    """The client's, unless it could forge a line of the log; headers, errors and events have it."""
    with running(Held()) as (app, _):
        answers = [post(app, body, **{"X-Request-Id": sent}) for body in (b"{", GOOD | {"prompt": "memory"})]
        answers.append(send(app, "GET", "/nowhere", headers={"X-Request-Id": sent}))
        stream = post(app, GOOD | {"prompt": "memory", "stream": True}, **{"X-Request-Id": sent})
    for answer in answers:
        assert answer.json()["request_id"] == (made := answer.headers["X-Request-Id"])
        assert (made == sent) == (sent == "abc-1:2.3_4") and log.USUAL_ID.fullmatch(made)
    ((name, content),) = events(stream.text)
    assert name == "error" and content["error"]["message"] == "out of memory: use less"
    assert content["request_id"] == stream.headers["X-Request-Id"]


def test_each_request_has_a_line(saved, lines):
    """With all that it asked for and got; a refused one has the reason."""
    with running(Worker(Setup(str(saved("flux")), batch_size=2)), size=2) as (app, _):
        made = post(app, GOOD | {"computed_steps": 4, "n": 2}, **{"X-Request-Id": "a"}).json()
        assert [each["batch_size"] for each in made["data"]] == [metric(app, "dit_accel_batch_size_count")] * 2
        post(app, GOOD | {"steps": 99}, **{"X-Request-Id": "b"})
        post(app, GOOD | {"prompt": ["secret"], "negative_prompt": 9 * ["secret"]})
    *_, done, refused, wrong = lines()  # after warnings of other libraries
    assert "prompt: Input should be a valid string" in wrong["error"] and "secret" not in str(wrong)
    assert (done["request_id"], done["status"], done["outcome"]) == ("a", 200, "ok") and done["level"] == "INFO"
    assert (done["model"], done["preset"], done["size"], done["steps"]) == ("tiny", "balanced", "32x48", 6)
    assert done["computed_fractions"] == [each["computed_fraction"] for each in made["data"]]
    assert [each["computed_steps"] for each in done["contracts"]] == [4, 4] and done["batch_sizes"] == [2, 2]
    assert 0 <= done["queue_seconds"] < done["run_seconds"]
    assert (refused["request_id"], refused["status"], refused["outcome"]) == ("b", 400, "invalid")
    assert "steps must be at most 12" in refused["error"] and "model" not in refused


def test_a_failed_run_is_in_the_log_with_the_id(lines):
    """The worker's thread logs the traceback, and the request's line follows."""
    with running(Held()) as (app, _):
        post(app, GOOD | {"prompt": "secret", "loras": {}}, **{"X-Request-Id": "a"})
    failure, line = lines()
    assert failure["request_id"] == line["request_id"] == "a" and "a secret path" in failure["traceback"]
    assert (line["status"], line["outcome"]) == (500, "failed") and "secret" not in line["error"]
    record = logging.makeLogRecord({"msg": "it died", "levelname": "ERROR"})
    assert log.TextLines().format(record) == "ERROR [-] it died"


def test_a_video_has_one_line_at_its_end(lines):
    """One that the queue refuses too."""

    async def conversation(http, dispatcher):
        jobs = [(await http.post("/v1/videos", json=GOOD | {"prompt": text})).json() for text in ("a", "memory")]
        jobs = [await ended(http, job["id"]) for job in jobs]
        dispatcher.close()
        return [*jobs, (await http.post("/v1/videos", json=GOOD)).json()]

    jobs, ends = ask(released(), conversation), lines()
    assert [(line["outcome"], line["status"]) for line in ends] == [("ok", 200), ("failed", 500), ("busy", 503)]
    assert [line["request_id"] for line in ends] == [job["request_id"] for job in jobs]


class Recorded(trace.NonRecordingSpan):
    status = None

    def set_status(self, status, description=None):
        self.status = description

    def end(self, end_time=None):
        self.seconds = (end_time - self.start) / 1e9


class Tracer(trace.NoOpTracer):
    def __init__(self):
        self.spans = []

    def start_span(self, name, context=None, kind=None, attributes=None, start_time=None, **_):
        parent = trace.get_current_span(context).get_span_context()
        span = Recorded(trace.SpanContext(parent.trace_id, len(name), is_remote=False))
        span.name, span.parent, span.attributes, span.start = name, parent, attributes, start_time
        self.spans.append(span)
        return span


def test_spans_are_of_the_clients_trace(monkeypatch):
    """A span of the request within the client's, and within it the queue and the run, with the times of the line."""
    tracer = Tracer()
    monkeypatch.setattr(trace, "get_tracer", lambda name: tracer)
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with running(released()) as (app, _):
        assert post(app, GOOD, traceparent=caller).status_code == 200
        post(app, GOOD | {"steps": 99}, traceparent=caller)
    whole, queue, run, refused = tracer.spans
    assert [span.name for span in (whole, queue, run)] == [f"POST {PATH}", "queue", "run"]
    assert {span.parent.trace_id for span in tracer.spans} == {int("ab" * 16, 16)}
    assert whole.parent.span_id == int("cd" * 8, 16) and {queue.parent.span_id, run.parent.span_id} == {len(whole.name)}
    assert abs(queue.seconds + run.seconds - whole.seconds) < 0.1 and whole.attributes["dit_accel.status"] == 200
    assert whole.status is None and "at most 12" in refused.status
