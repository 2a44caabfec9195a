"""Prometheus metrics of a server."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dit_accel.serving.dispatcher import Dispatcher
from dit_accel.serving.engine import Made
from dit_accel.serving.http.api import RequestError

FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)  # buckets of the computed fraction
BATCHES = (1, 2, 4, 8, 16)  # buckets of samples in a call
SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)  # buckets of requests


class Metrics:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        into = {"registry": self.registry}
        self.requests = Counter("dit_accel_requests", "requests by outcome", ["outcome"], **into)
        self.seconds = Histogram("dit_accel_request_seconds", "answered requests", buckets=SECONDS, **into)
        self.stages = Counter("dit_accel_stage_seconds", "seconds of runs by stage", ["stage"], **into)
        self.computed = Histogram("dit_accel_computed_fraction", "FLOPs of a run, plain = 1", buckets=FRACTIONS, **into)
        self.batches = Histogram("dit_accel_batch_size", "results by samples of their call", buckets=BATCHES, **into)
        self.terms = Counter("dit_accel_contracts", "results by term of their contract", ["term", "outcome"], **into)
        Gauge("dit_accel_queue_length", "waiting requests", **into).set_function(lambda: dispatcher.waiting)
        Gauge("dit_accel_running", "requests that run", **into).set_function(lambda: dispatcher.running)

    def take(self, error: RequestError | None, seconds: float, results: Sequence[Made]) -> str:
        """Count a request that has ended, its wait for its first call, and its results; return its outcome."""
        outcome = "ok" if error is None else error.outcome
        self.requests.labels(outcome).inc()
        if error is None:
            self.seconds.observe(seconds)
        self.stages.labels("queue").inc(min((it.contract.get("queue_seconds", 0.0) for it in results), default=0.0))
        for result in results:
            for stage, spent in result.stages.items():
                self.stages.labels(stage).inc(spent / len(result.batch))
            self.batches.observe(len(result.batch))
            self.computed.observe(result.computed_fraction)
            for term in result.contract.keys() & {"decided_by", "deadline_met", "floor_met"}:
                self.terms.labels(term, str(result.contract[term]).lower()).inc()
        return outcome
