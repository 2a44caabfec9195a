"""Prometheus metrics of a server."""

import time
from asyncio import CancelledError
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dit_accel.serving.dispatcher import Dispatcher, Task
from dit_accel.serving.engine import Cancelled, Made
from dit_accel.serving.http.api import Limits, RequestError, answered

FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)  # buckets of the computed fraction
SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)  # buckets of requests


class Metrics:
    def __init__(self, dispatcher: Dispatcher, limits: Limits) -> None:
        self._limits = limits
        self.registry = CollectorRegistry()
        into = {"registry": self.registry}
        self.requests = Counter("dit_accel_requests", "requests by outcome", ["outcome"], **into)
        self.seconds = Histogram("dit_accel_request_seconds", "answered requests", buckets=SECONDS, **into)
        self.stages = Counter("dit_accel_stage_seconds", "seconds of runs by stage", ["stage"], **into)
        self.computed = Histogram("dit_accel_computed_fraction", "FLOPs of a run, plain = 1", buckets=FRACTIONS, **into)
        self.terms = Counter("dit_accel_contracts", "results by term of their contract", ["term", "outcome"], **into)
        Gauge("dit_accel_queue_length", "waiting requests", **into).set_function(lambda: dispatcher.waiting)
        Gauge("dit_accel_running", "requests that run", **into).set_function(lambda: dispatcher.running)

    def finish(self, task: Task, results: Sequence[Made]) -> None:
        self.requests.labels("ok").inc()
        self.seconds.observe(time.monotonic() - task.created)
        for result in results:
            for stage, seconds in result.stages.items():
                self.stages.labels(stage).inc(seconds)
            self.computed.observe(result.computed_fraction)
            for term in ("decided_by", "deadline_met", "floor_met"):
                if term in result.contract:
                    self.terms.labels(term, str(result.contract[term]).lower()).inc()
            self.stages.labels("queue").inc(result.contract.get("queue_seconds", 0.0))

    def counted(self, error: BaseException) -> RequestError:
        answer = answered(error, self._limits)
        cancelled = isinstance(error, Cancelled | CancelledError | GeneratorExit)
        kind = answer.code if answer.code in ("busy", "timeout") else "invalid" if answer.status < 500 else "failed"
        self.requests.labels("cancelled" if cancelled else kind).inc()
        return answer
