"""Mistakes in `dit_accel/tools`: sides, bounds and runs that are confused."""

from __future__ import annotations

from scripts.checks.changes.mutant import Mutant

CLI = "dit_accel/cli"
TOOLS = "dit_accel/tools"
TEST_CLI = "tests/cli"
TEST_SERVING = "tests/serving"
TEST_TOOLS = "tests/tools"

MUTANTS = [
    Mutant(
        "a-square-video",
        f"{TOOLS}/advise/recommend.py",
        "* (height // 16) * (width // 16)",
        "* (height // 16) * (height // 16)",
        "a video's length counts both sides",
        f"{TEST_TOOLS}/advise/test_recommend.py",
    ),
    Mutant(
        "branches-of-three-gpus",
        f"{TOOLS}/advise/recommend.py",
        "and gpus % 2 == 0 and not few",
        "and not few",
        "an odd number of GPUs shares no branches",
        f"{TEST_TOOLS}/advise/test_recommend.py",
    ),
    Mutant(
        "the-step-before-a-run",
        f"{TOOLS}/media/preview.py",
        "        shown_at = time.monotonic()\n        self.forget_latents()\n",
        "        shown_at = time.monotonic()\n",
        "a run's first preview uses no latents of an earlier run",
        f"{TEST_TOOLS}/media/test_preview.py",
    ),
    Mutant(
        "latents-stay-after-learning",
        f"{TOOLS}/media/preview.py",
        "        self._weights = None\n        self.forget_latents()\n        if tokens is None:",
        "        self._weights = None\n        if tokens is None:",
        "a learned preview keeps no latents",
        f"{TEST_TOOLS}/media/test_preview.py",
    ),
    Mutant(
        "a-level-after-the-last",
        f"{TOOLS}/media/preview.py",
        "len(sigmas) <= index + 1",
        "len(sigmas) <= index",
        "a step without a later noise level has no levels",
        f"{TEST_TOOLS}/media/test_preview.py",
    ),
    Mutant(
        "a-timer-stays",
        f"{TOOLS}/measure/timing.py",
        "        for handle in handles:\n            handle.remove()",
        "        for handle in [*handles][:1]:\n            handle.remove()",
        "timing leaves no hook on a transformer",
        f"{TEST_TOOLS}/measure/test_timing.py",
    ),
    Mutant(
        "a-mean-of-two-pixels",
        f"{TOOLS}/measure/metrics.py",
        "reshape(height, 2, width, 2).mean((1, 3))",
        "reshape(height, 2, width, 2)[:, 0].mean(-1)",
        "each scale of MS-SSIM is the mean of four pixels",
        f"{TEST_TOOLS}/measure/test_metrics.py",
    ),
    Mutant(
        "labels-of-one-side",
        f"{TOOLS}/media/strips.py",
        '        captions = [label, *(f"frame {index}" for index in chosen[1:])]',
        '        captions = [labels[0], *(f"frame {index}" for index in chosen[1:])]',
        "each row of a strip has its own label",
        f"{TEST_TOOLS}/media/test_strips.py",
    ),
    Mutant(
        "files-of-another-rate",
        f"{CLI}/generate.py",
        '(("dtype", options.dtype), ("fps", options.fps)) if value}',
        '(("dtype", options.dtype),) if value}',
        "a resumed job with another frame rate makes its files again",
        f"{TEST_CLI}/test_manifest.py",
    ),
    Mutant(
        "results-of-the-first",
        f"{CLI}/comparison.py",
        "medium.write_comparison(plain.output.results[index],",
        "medium.write_comparison(plain.output.results[0],",
        "each result is compared with its own plain one",
        f"{TEST_CLI}/test_comparison.py",
    ),
    Mutant(
        "the-plain-sound-is-measured",
        f"{CLI}/comparison.py",
        "audio_quality(fast.sounds[0], plain.sounds[0])",
        "audio_quality(plain.sounds[0], fast.sounds[0])",
        "a quieter accelerated sound has a negative ratio",
        f"{TEST_CLI}/test_comparison.py",
    ),
    Mutant(
        "one-speed-up-for-all",
        f"{CLI}/web_view.py",
        'f"{plain.seconds / fast.seconds:.2f}×"\n',
        'f"{end.speedup:.2f}×"\n',
        "the page's speed-up of a whole call is that of its seconds",
        f"{TEST_CLI}/test_web_view.py",
    ),
    Mutant(
        "an-exception-keeps-tokens",
        f"{TOOLS}/measure/capture.py",
        "register_forward_hook(self._end, always_call=True)",
        "register_forward_hook(self._end)",
        "after an exception attention outside of the transformer is not visited",
        f"{TEST_TOOLS}/measure/test_capture.py",
    ),
    Mutant(
        "the-first-heads-only",
        f"{TOOLS}/measure/tune/calibration.py",
        "(torch.arange(kept) + taken * kept) % heads",
        "torch.arange(kept) % heads",
        "each sample records further heads",
        f"{TEST_TOOLS}/measure/tune/test_calibration.py",
    ),
    Mutant(
        "the-doubt-of-one-prompt",
        f"{TOOLS}/measure/tune/result.py",
        "statistics.stdev(values) / len(values) ** 0.5 if",
        "statistics.stdev(values) if",
        "more prompts make the mean more certain",
        f"{TEST_TOOLS}/measure/tune/test_tune.py",
    ),
    Mutant(
        "a-deleted-attribute-stays-away",
        f"{TOOLS}/measure/compare/snapshot.py",
        "            for name in before.keys() - now.keys():\n                setattr(holder, name, before[name])\n",
        "",
        "attributes that a method deletes come back",
        f"{TEST_TOOLS}/measure/compare/test_snapshot.py",
    ),
    Mutant(
        "a-cancelled-run-keeps-its-bar",
        f"{TOOLS}/steps.py",
        "    try:\n        yield\n    finally:\n        del pipe.progress_bar",
        "    yield\n    del pipe.progress_bar",
        "a cancelled job's steps go to no later job",
        f"{TEST_SERVING}/test_worker.py",
    ),
    Mutant(
        "one-mean-for-all-channels",
        f"{TOOLS}/measure/audio_metrics.py",
        "values.mean(-1, keepdims=True)",
        "values.mean()",
        "each channel's mean is subtracted",
        f"{TEST_TOOLS}/measure/test_audio_metrics.py",
    ),
    Mutant(
        "an-interrupted-file-stays",
        f"{TOOLS}/files.py",
        "    except BaseException:\n        if is_file:",
        "    except Exception:\n        if is_file:",
        "an interrupt leaves no part of a file",
        f"{TEST_TOOLS}/test_files.py",
    ),
]
