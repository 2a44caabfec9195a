"""A pipeline that is loaded and accelerated once and runs many jobs in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dit_accel.errors import ArgumentError, PresetError, UnsupportedError
from dit_accel.serving.deadlines import Busy, Times, contract_of
from dit_accel.serving.engine import Loaded, Made, VideoForm, made_alone
from dit_accel.serving.estimates import first_whole
from dit_accel.serving.loras import NamedLoras, require_named
from dit_accel.serving.media import Clips, size_note
from dit_accel.serving.pipelines import Setup, call_arguments, open_pipeline, start_pipeline, timed_call
from dit_accel.serving.previews import JobPreviews, Previews
from dit_accel.serving.processes import ranks
from dit_accel.serving.prompts import CONTRACT, DEADLINE, OWN, PARTIAL_IMAGES, STREAM, Job, contracted
from dit_accel.tools.steps import watched_steps

if TYPE_CHECKING:
    from dit_accel.presets import Preset
    from dit_accel.tools.measure.timing import Output


class Worker:
    """Engine of one process, which checks the jobs of its setup; ``console`` None = silent."""

    def __init__(self, setup: Setup, console: Console | None = None) -> None:
        console = console or Console(quiet=True)
        self.pipe, self.medium, preset = open_pipeline(setup, console)
        self._setup, self._console, self._times = setup, console, Times()
        self._guider = getattr(self.pipe, "guider", None)
        self._loras = NamedLoras(self.pipe, loras) if (loras := setup.loading.named_loras) else None
        self.suffix = self.medium.default_output.suffix
        self.preset, self._base = preset and preset.effective(), preset
        self._has_contracts = any(name in job.settings for job in setup.jobs for name in CONTRACT)  # of lines
        for job in setup.jobs:
            self._arguments([job])
            self._preset_of(job)
        start_pipeline(self.pipe, self._decided_apart(preset), console.quiet)
        self.previews = Previews(self.pipe)

    @property
    def loaded(self) -> Loaded:
        unit = first_whole(self.pipe, "vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        form = VideoForm(self.medium.fps, unit or 1, self.medium.in_chunks) if isinstance(self.medium, Clips) else None
        preset = getattr(getattr(self.pipe, "dit_accel", None), "preset", None)  # in use
        return Loaded(form, preset, self.suffix, self._base)

    def run(self, jobs: Sequence[Job], preset: Preset | None, suffix: str, tell: Callable[..., None]) -> list[Made]:
        """Run jobs in one call with their own preset; ``tell`` takes steps, and a partial image or bytes."""
        self._begin(jobs, preset)
        has_previews = len(jobs) == 1 and not isinstance(self.medium, Clips)
        previews = self.previews.of(jobs[0], suffix) if has_previews else None
        growing = nullcontext(partial(previews.step, tell) if previews else tell)
        if jobs[0].settings.get(STREAM):
            from dit_accel.streaming import streamed_file

            growing = streamed_file(self.pipe, jobs[0].settings.get("fps") or self.medium.fps, tell)
        try:
            with growing as tell:
                return self.make(jobs, suffix, previews, tell)
        finally:
            if previews:
                previews.previewer.forget_latents()  # which may be on the GPU

    def _begin(self, jobs: Sequence[Job], preset: Preset | None) -> None:
        started, limits = time.perf_counter(), jobs[0].settings.get(DEADLINE)
        self.use(preset if limits is not None and len(jobs) == 1 else self._decided_apart(preset))
        if limits is not None:
            self.pipe.dit_accel.end_next_run(self.pipe, started, *limits)

    def make(
        self,
        batch: Sequence[Job],
        suffix: str | None = None,
        previews: JobPreviews | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> list[Made]:
        """Run jobs that share their settings in one call of the pipeline; ``suffix`` None = :attr:`suffix`."""
        output = self.call(batch, tell, previews and previews.callback())
        if previews:
            previews.previewer.learn(output.results[0])
        if len(output.results) != len(batch):
            raise UnsupportedError(f"{type(self.pipe).__name__} made {len(output.results)} of {len(batch)} prompts")
        report = self.pipe.dit_accel.report() if self.preset else None
        indices, results = [job.index for job in batch], list[Made]()
        with TemporaryDirectory() as folder:
            for place, (job, result) in enumerate(zip(batch, output.results, strict=True)):
                file = Path(folder) / job.name(suffix or self.suffix)
                fps, rate = job.settings.get("fps"), getattr(self.medium, "sampling_rate", None)
                medium = Clips(fps, rate) if fps else self.medium
                medium.write(result, file, output.sound(place))
                shape, note = result.shape[:3] if isinstance(medium, Clips) else None, size_note(job.settings, result)
                call = output.denoising_seconds, report and report.of_prompt(place).to_json(), indices, output.stages
                results.append(Made(file.read_bytes(), *call, shape, note))
        return results

    def call(
        self,
        batch: Sequence[Job],
        tell: Callable[[int, int], None] | None = None,
        at_step_end: Callable[..., dict[str, Any]] | None = None,
    ) -> Output:
        """Call the pipeline once, for jobs that share their settings; ``at_step_end`` is the call's callback."""
        from dit_accel.models.families import chunks

        arguments = self._arguments(batch)
        if self._loras is not None:
            self._loras.use(batch[0].settings.get("loras", {}))
        if at_step_end is not None:
            arguments["callback_on_step_end"] = at_step_end
        seeds = [job.settings["seed"] for job in batch]
        try:
            with watched_steps(self.pipe, tell, chunks(self.pipe, arguments)) if tell else nullcontext():
                return timed_call(self.pipe, arguments, seeds if len(batch) > 1 else seeds[0])
        except BaseException:
            self.pipe.maybe_free_model_hooks()  # move offloaded weights off the GPU, as at the end of a call
            raise

    def make_all(self, batches: Sequence[Sequence[Job]], progress: Any) -> Iterator[tuple[Job, Made]]:
        """Run all batches. If a batch fails, its jobs run one at a time; then the first error is raised."""
        progress.watch(self.pipe)
        for batch in batches:
            more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            progress.begin(batch[0].name(self.suffix) + more, len(batch))
            try:
                yield from zip(batch, self._make_lines(batch), strict=True)
            except Exception as error:
                if len(batch) == 1 or ranks() > 1:  # other processes may not fail, and would wait
                    raise
                self._console.out(f"note: {made_alone(batch, error)}", highlight=False)
                yield from self._make_alone(batch, progress)

    def _make_alone(self, batch: Sequence[Job], progress: Any) -> Iterator[tuple[Job, Made]]:
        errors = []
        for job in batch:
            progress.begin(job.name(self.suffix), 1.0)
            try:
                (result,) = self._make_lines([job])
            except Exception as error:
                errors.append(error)
            else:
                yield job, result
        if errors:
            raise errors[0]

    def _make_lines(self, batch: Sequence[Job]) -> list[Made]:
        """Run lines in one call by the contract that they share, and state what was kept of it."""
        if not self._has_contracts:
            return self.make(batch)
        preset, begun, limited = self._preset_of(batch[0]), time.monotonic(), batch
        task = SimpleNamespace(preset=preset, model=None, created=begun, deadline=batch[0].settings.get("max_seconds"))
        try:
            if ranks() == 1:  # processes that share lines would not all refuse the same
                limited = self._times.limited(task, batch, 1)
        except (ArgumentError, Busy) as error:
            raise ArgumentError("prompts", f"line {batch[0].index + 1}: {error}") from None
        self._begin(limited, preset)
        results = self.make(limited)
        self._times.take(task, batch, results[0], time.monotonic() - begun)
        return [replace(result, contract=contract_of(task, result, begun)) for result in results]

    def _preset_of(self, job: Job) -> Preset | None:
        try:
            return contracted(self._base, job.settings, self.loaded.form)
        except PresetError as error:
            raise ArgumentError("prompts", f"line {job.index + 1}: {error}") from None

    def _decided_apart(self, preset: Preset | None) -> Preset | None:
        """Let each prompt of a batch skip its own steps, unless the preset has or does not support ``per_prompt``."""
        from dit_accel.models.presets import decided_apart

        if preset is None or self._setup.batch_size == 1:
            return preset
        try:
            return decided_apart(preset)
        except PresetError as error:
            note = "note: all prompts of a batch compute the steps of the prompt that needs most"
            self._console.out(f"{note}: {error}", highlight=False)
            return preset

    def use(self, preset: Preset | None) -> None:
        """Change the preset; if the pipeline does not support it, nothing is changed."""
        if preset == self.loaded.preset:
            return
        if preset is None:
            from dit_accel.pipeline import restore_pipeline

            restore_pipeline(self.pipe)
        else:
            try:
                start_pipeline(self.pipe, preset, self._console.quiet)
            except UnsupportedError as error:
                raise ArgumentError("preset", str(error)) from None
        self.preset = preset and preset.effective()

    def _arguments(self, batch: Sequence[Job]) -> dict[str, Any]:
        """Return the arguments of the pipeline's call; a job's guidance replaces the guider for this call only."""
        if self._guider is not None:
            self.pipe.guider = self._guider
        require_named(batch[0].settings.get("loras", {}), self._setup.loading.named_loras)
        settings, others = batch[0].settings, ("seed", "loras", PARTIAL_IMAGES, STREAM, DEADLINE, *CONTRACT)
        options = {"fps": self._setup.fps} | {key: value for key, value in settings.items() if key not in others}
        if len(batch) > 1:
            options |= {key: [job.settings[key] for job in batch] for key in OWN if key in options}
        return call_arguments(self.pipe, self._setup.model, {"image": self._setup.image, **options}, self._setup.call)
