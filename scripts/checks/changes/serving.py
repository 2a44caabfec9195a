"""Mistakes in `dit_accel/serving`: ends, limits and estimates of a server."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/serving/http/server.py": [
        ("the-watch-of-a-client-stays", "nothing watches the client of an answered request",
         "tests/serving/http/test_server.py",
         "        finally:\n            client.cancel()\n", "        finally:\n            pass\n"),
        ("time-in-the-queue-is-free", "a request's time limit includes the queue", "tests/serving/http/test_server.py",
         "self.limits.seconds - (time.monotonic() - task.created)", "self.limits.seconds"),
        ("partial-images-of-one", "each image of a request numbers its own partial images",
         "tests/serving/http/test_server.py",
         "partials[event.job.index] += 1", "partials[0] += 1")],
    "dit_accel/serving/http/log.py": [
        ("a-stream-that-never-begins", "a client that leaves a stream before its first event frees the GPU",
         "tests/serving/http/test_server.py", "task.cancel()\n            if is_over", "pass\n            if is_over"),
        ("any-id-is-logged", "an id of a client forges no line", "tests/serving/http/test_log.py",
         "sent if USUAL_ID.fullmatch(sent) else secrets.token_hex(16)", "sent or secrets.token_hex(16)")],
    "dit_accel/serving/dispatcher.py": [
        ("a-wait-that-only-grows", "Retry-After falls again after short requests", "tests/serving/test_dispatcher.py",
         "/ len(task.tasks) - self._seconds)", "/ len(task.tasks))"),
        ("a-wait-of-one-worker", "several workers make the wait shorter", "tests/serving/test_dispatcher.py",
         "* (waiting + 1) / len(self._threads)", "* (waiting + 1)"),
        ("idle-workers-do-not-count", "a queue of 0 takes a request for each idle worker",
         "tests/serving/test_dispatcher.py",
         "self._most + len(self._threads) - len(self._running)", "self._most"),
        ("a-restart-heals-nothing", "a worker that restarts is healthy", "tests/serving/test_dispatcher.py",
         "                else:\n                    self._failures.pop(worker, None)\n", ""),
        ("a-closed-queue-restarts", "a server that ends loads no pipeline again", "tests/serving/test_dispatcher.py",
         "if is_broken and not self.is_closed:", "if is_broken:"),
        ("one-run-is-cancelled", "a server that stops cancels the runs of all workers",
         "tests/serving/test_dispatcher.py",
         "in self._running for task in running.tasks]", "in self._running[:1] for task in running.tasks]"),
        ("one-who-leaves-ends-a-call", "a cancelled request leaves its neighbours", "tests/serving/test_sharing.py",
         "return all(task.is_cancelled", "return any(task.is_cancelled"),
        ("a-shared-wait", "each request of a shared call states its own wait", "tests/serving/test_sharing.py",
         "{\"queue_seconds\": waited - task.created}", "{}"),
        ("retries-wait-again", "requests of a failed call go first", "tests/serving/test_sharing.py",
         "self._waiting.appendleft(task)", "self._waiting.append(task)")],
    "dit_accel/serving/sharing.py": [
        ("equal-noise-shares", "requests with equal seeds share no call", "tests/serving/test_sharing.py",
         "seeds.isdisjoint(_seeds(task)) and ", ""),
        ("one-worker-takes-all", "idle workers get their part", "tests/serving/test_sharing.py",
         "len(others) // (idle + 1)", "len(others)")],
    "dit_accel/serving/deadlines.py": [
        ("a-wait-that-deadlines-ignore", "a deadline includes the queue", "tests/serving/test_contracts.py",
         "((limit - waited) / calls, end)", "(limit / calls, end)"),
        ("a-deadline-of-each-image", "images of a request share its deadline", "tests/serving/test_contracts.py",
         "((limit - waited) / calls, end)", "((limit - waited), end)")],
    "dit_accel/serving/http/requests.py": [
        ("one-side-of-an-image", "both sides of an input image are limited", "tests/serving/http/test_requests.py",
         "if max(image.size) > limits.side:", "if image.size[0] > limits.side:"),
        ("a-side-below-the-limit", "the largest side is accepted", "tests/serving/http/test_requests.py",
         "<= side <= limits.side", "<= side < limits.side")],
    "dit_accel/serving/input_images.py": [
        ("a-mask-without-an-opaque-pixel", "a mask may be transparent everywhere",
         "tests/serving/http/test_requests.py",
         "alpha.getextrema()[0] < 255", "alpha.getextrema() == (0, 255)")],
    "dit_accel/serving/worker.py": [
        ("weights-stay-after-a-cancel", "a cancelled job moves offloaded weights off the GPU",
         "tests/serving/test_worker.py",
         "            self.pipe.maybe_free_model_hooks()", "            pass"),
        ("latents-stay-after-a-job", "a job's latents are dropped at its end", "tests/serving/test_worker.py",
         "            if previews:\n                previews.previewer.forget_latents()  # which may be on the GPU\n",
         "            pass\n"),
        ("a-sound-for-all", "each video of a batch has its own sound", "tests/cli/test_manifest.py",
         "output.sound(place)", "output.sound(0)"),
        ("guider-of-the-last-job", "a job's guidance does not reach later jobs", "tests/cli/test_batch.py",
         "        if self._guider is not None:\n            self.pipe.guider = self._guider\n", "")],
    "dit_accel/serving/previews.py": [
        ("previews-by-one-side", "each size of images has its own previewer", "tests/serving/test_worker.py",
         'job.settings.get("height"), job.settings.get("width")',
         'job.settings.get("height"), job.settings.get("height")')],
    "dit_accel/serving/http/videos.py": [
        ("input-images-stay", "an ended video keeps no input image", "tests/serving/http/test_video_store.py",
         "        self.jobs = []  # the input image needs memory\n", ""),
        ("a-cancelled-video-begins", "a video that was cancelled in the queue stays failed",
         "tests/serving/http/test_video_store.py",
         "            if self.ended is None:\n                self.status, self._latest",
         "            if True:\n                self.status, self._latest"),
        ("one-video-fewer", "as many videos as the limit are kept", "tests/serving/http/test_video_store.py",
         "number[kind] > limits.videos", "number[kind] >= limits.videos")],
    "dit_accel/serving/http/connections.py": [
        ("a-reader-is-watched-for-ever", "a client that has read the answer is not closed",
         "tests/serving/http/test_connections.py",
         "        super().resume_writing()\n        if self._unread is not None:\n            self._unread.cancel()",
         "        super().resume_writing()")],
    "dit_accel/serving/http/bodies.py": [
        ("a-body-of-the-limit", "a body of exactly the limit is read", "tests/serving/http/test_edits.py",
         "if len(body) > most:", "if len(body) >= most:"),
        ("a-cut-form-is-read", "a form without its end is refused", "tests/serving/http/test_edits.py",
         'not in b"\\r\\n" + body:', 'not in body + b"\\r\\n--x--":')],
})
