"""Mistakes in `dit_accel/tools`: sides, bounds and runs that are confused."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/tools/advise/memory.py": [
        ("encoders-take-nothing", "memory includes text encoders", "tests/tools/advise/test_recommend.py",
         "*self.texts, self.undivided", "self.undivided")],
    "dit_accel/tools/advise/recommend.py": [
        ("branches-of-three-gpus", "an odd number of GPUs shares no branches", "tests/tools/advise/test_recommend.py",
         "and gpus % 2 == 0 and not few", "and not few")],
    "dit_accel/tools/media/preview.py": [
        ("the-step-before-a-run", "a run's first preview uses no latents of an earlier run",
         "tests/tools/media/test_preview.py",
         "        self.forget_latents()\n\n        def callback", "        def callback"),
        ("latents-stay-after-learning", "a learned preview keeps no latents", "tests/tools/media/test_preview.py",
         "        self._weights, latents = None, self.latents\n        self.forget_latents()\n",
         "        self._weights, latents = None, self.latents\n"),
        ("a-level-after-the-last", "a step without a later noise level has no levels",
         "tests/tools/media/test_preview.py",
         "len(sigmas) <= index + 1", "len(sigmas) <= index")],
    "dit_accel/tools/measure/timing.py": [
        ("a-timer-stays", "timing leaves no hook on a transformer", "tests/tools/measure/test_timing.py",
         "        for handle in handles:\n            handle.remove()",
         "        for handle in [*handles][:1]:\n            handle.remove()")],
    "dit_accel/tools/measure/metrics.py": [
        ("a-mean-of-two-pixels", "each scale of MS-SSIM is the mean of four pixels",
         "tests/tools/measure/test_metrics.py",
         "reshape(height, 2, width, 2).mean((1, 3))", "reshape(height, 2, width, 2)[:, 0].mean(-1)")],
    "dit_accel/tools/media/strips.py": [
        ("labels-of-one-side", "each row of a strip has its own label", "tests/tools/media/test_strips.py",
         '        captions = [label, *(f"frame {index}" for index in chosen[1:])]',
         '        captions = [labels[0], *(f"frame {index}" for index in chosen[1:])]')],
    "dit_accel/cli/generate.py": [
        ("files-of-another-rate", "a resumed job with another frame rate makes its files again",
         "tests/cli/test_written.py",
         '(("dtype", options.dtype), ("fps", options.fps)) if value}', '(("dtype", options.dtype),) if value}')],
    "dit_accel/cli/comparison.py": [
        ("results-of-the-first", "each result is compared with its own plain one", "tests/cli/test_comparison.py",
         "medium.write_comparison(plain.output.results[index],", "medium.write_comparison(plain.output.results[0],"),
        ("the-plain-sound-is-measured", "a quieter accelerated sound has a negative ratio",
         "tests/cli/test_written.py",
         "audio_quality(fast.sounds[0], plain.sounds[0])", "audio_quality(plain.sounds[0], fast.sounds[0])")],
    "dit_accel/cli/web_texts.py": [
        ("one-speed-up-for-all", "the page's speed-up of a whole call is that of its seconds",
         "tests/cli/test_web_page.py",
         'f"{plain.seconds / fast.seconds:.2f}×"\n', 'f"{end.speedup:.2f}×"\n')],
    "dit_accel/tools/measure/capture.py": [
        ("an-exception-keeps-tokens", "after an exception attention outside of the transformer is not visited",
         "tests/tools/measure/test_capture.py",
         "register_forward_hook(self._end, always_call=True)", "register_forward_hook(self._end)")],
    "dit_accel/tools/measure/tune/calibration.py": [
        ("the-first-heads-only", "each sample records further heads", "tests/tools/measure/tune/test_calibration.py",
         "(torch.arange(kept) + taken * kept) % heads", "torch.arange(kept) % heads")],
    "dit_accel/tools/measure/tune/result.py": [
        ("the-doubt-of-one-prompt", "more prompts make the mean more certain", "tests/tools/measure/tune/test_tune.py",
         "statistics.stdev(values) / len(values) ** 0.5 if", "statistics.stdev(values) if")],
    "dit_accel/tools/measure/compare/snapshot.py": [
        ("a-deleted-attribute-stays-away", "attributes that a method deletes come back",
         "tests/tools/measure/compare/test_snapshot.py",
         "names = before.keys() | now.keys()", "names = now.keys()")],
    "dit_accel/tools/steps.py": [
        ("a-cancelled-run-keeps-its-bar", "a cancelled job's steps go to no later job", "tests/serving/test_worker.py",
         "    try:\n        yield\n    finally:\n        del pipe.progress_bar",
         "    yield\n    del pipe.progress_bar")],
    "dit_accel/tools/measure/audio_metrics.py": [
        ("one-mean-for-all-channels", "each channel's mean is subtracted", "tests/tools/measure/test_audio_metrics.py",
         "values.mean(-1, keepdims=True)", "values.mean()")],
    "dit_accel/tools/files.py": [
        ("an-interrupted-file-stays", "an interrupt leaves no part of a file", "tests/tools/test_files.py",
         "    except BaseException:\n        if is_file:", "    except Exception:\n        if is_file:")],
})
