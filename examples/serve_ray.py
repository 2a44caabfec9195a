"""Serve images over HTTP with Ray Serve. Requests of one shape share a call; a full queue answers 503.

    python examples/serve_ray.py --port 8000
    curl -d '{"prompt": "a yellow ring", "steps": 20}' localhost:8000/generate --output ring.png

Needs ``pip install 'dit-accel[serve-ray]'``. GET /health and /metrics (Prometheus) answer during generation. Each GPU
of the Ray cluster runs one replica; a machine without GPUs runs one on a CPU. Ctrl-C or SIGTERM ends it after all
accepted requests.
"""

import argparse
import asyncio
import logging
import os
import signal
import threading
import time
from typing import Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Summary, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

BATCH, QUEUE = 4, 16  # prompts per call; requests that wait for a busy replica
LARGEST, MOST_STEPS, SECONDS = 512, 50, 300  # side in pixels; steps; timeout of a request
APPLICATION = "images"


class Wanted(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str = Field(min_length=1, max_length=500)
    seed: int = Field(0, ge=0, lt=2**63)
    steps: int = Field(MOST_STEPS, ge=1, le=MOST_STEPS)
    height: int = Field(LARGEST, ge=64, le=LARGEST, multiple_of=16)
    width: int = Field(LARGEST, ge=64, le=LARGEST, multiple_of=16)

    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.steps


@serve.deployment(max_ongoing_requests=2 * BATCH, max_queued_requests=QUEUE)
class Images:
    """A pipeline, loaded and accelerated once."""

    def __init__(self, model: str, device: str) -> None:
        from dit_accel.serving import Loading, Setup, Worker

        self.worker = Worker(Setup(model, overrides={"per_prompt": False}, loading=Loading(device), batch_size=BATCH))

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.02)
    async def __call__(self, requests: list[Wanted]) -> list[tuple[bytes, float]]:
        return await asyncio.to_thread(self.make, requests)

    def make(self, requests: list[Wanted]) -> list[tuple[bytes, float]]:
        """Return a PNG file and the computed fraction for each request, with one call of the pipeline per shape."""
        from dit_accel.serving import Job, batches

        jobs = [Job(index, wanted.model_dump()) for index, wanted in enumerate(requests)]
        jobs.sort(key=lambda job: requests[job.index].shape())
        made = {}
        for batch in batches(jobs, BATCH):
            for job, image in zip(batch, self.worker.make(batch), strict=True):
                made[job.index] = image.data, image.report["computed_fraction"]
        return [made[index] for index in range(len(requests))]


@serve.deployment(max_ongoing_requests=1000, max_queued_requests=1000, ray_actor_options={"num_cpus": 0})
class Front:
    """Check requests and count answers, without blocking."""

    def __init__(self, images: Any) -> None:
        self.images, self.waiting, self.closed = images, 0, False
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "dit_accel_answers", "answers of /generate, by status", ["status"], registry=self.registry
        )
        self.seconds = Summary("dit_accel_seconds", "seconds from request to image", registry=self.registry)
        self.computed = Summary(
            "dit_accel_computed_fraction", "computed fraction of each image", registry=self.registry
        )

    async def __call__(self, request: Request) -> Response:
        match request.method, request.url.path:
            case "POST", "/generate":
                self.waiting += 1
                try:
                    answer = await self.generate(await request.body())
                finally:
                    self.waiting -= 1
                self.answers.labels(answer.status_code).inc()
                return answer
            case "GET", "/metrics":
                return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)
            case "GET", "/health":
                running = await asyncio.to_thread(running_replicas)
                return PlainTextResponse(f"{running} replicas\n", 200 if running and not self.closed else 503)
        return PlainTextResponse("POST /generate, GET /health or GET /metrics\n", 404)

    async def generate(self, body: bytes) -> Response:
        started = time.monotonic()
        if self.closed:
            return PlainTextResponse("shutting down\n", 503)
        try:
            file, computed = await self.images.remote(Wanted.model_validate_json(body))
        except ValidationError as error:
            wrong = (": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors())
            return PlainTextResponse("; ".join(wrong) + "\n", 422)
        except BackPressureError:
            return PlainTextResponse(f"busy: {QUEUE} requests are waiting\n", 503, {"Retry-After": "1"})
        except RayError as error:
            return PlainTextResponse(f"failed: {type(error).__name__}\n", 500)
        self.seconds.observe(time.monotonic() - started)
        self.computed.observe(computed)
        return Response(file, media_type="image/png", headers={"X-Computed-Fraction": f"{computed:.3f}"})

    async def close(self) -> None:
        """Reject new requests, and wait for accepted ones."""
        self.closed = True
        while self.waiting:
            await asyncio.sleep(0.05)


def running_replicas() -> int:
    states = serve.status().applications[APPLICATION].deployments["Images"].replica_states
    return states.get("RUNNING", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 allows other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="demo-flux", help="a demo model, a folder, or an id on the Hub")
    options = parser.parse_args()

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry from a cluster started here
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    address = {"host": options.host, "port": options.port}
    serve.start(http_options=address | {"request_timeout_s": SECONDS}, logging_config=quiet)
    images = Images.options(num_replicas=gpus or 1, ray_actor_options={"num_gpus": 1} if gpus else {"num_cpus": 1})
    application = Front.bind(images.bind(options.model, "cuda" if gpus else "cpu"))
    front = serve.run(application, name=APPLICATION, logging_config=quiet)

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"ready at http://{options.host}:{options.port}", flush=True)
    stop.wait()
    front.close.remote().result(timeout_s=SECONDS)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
