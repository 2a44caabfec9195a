"""Mistakes in `dit_accel/cli` and `dit_accel/serving`: behaviour of the commands."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/cli/batch.py": [
        ("manifest-without-preset", "outputs of another preset are not reused for this one",
         "tests/cli/test_manifest.py",
         ' | {"preset": engine.loaded.values_of(job)}', ""),
        ("a-cut-line-ends-the-manifest", "lines after a truncated line count", "tests/cli/test_manifest.py",
         "        except ValueError:\n            continue\n", "        except ValueError:\n            break\n")],
    "dit_accel/serving/prompts.py": [
        ("any-neighbours-together", "lines with different settings run in separate calls", "tests/cli/test_batch.py",
         "and together[-1][0].shared == job.shared", ""),
        ("flags-are-numbers", "a seed of `true` is an error", "tests/cli/test_pipelines.py",
         "not isinstance(value, kinds) or isinstance(value, bool)", "not isinstance(value, kinds)"),
        ("options-over-lines", "values in a line override the options", "tests/cli/test_batch.py",
         "Job(index, defaults | line)", "Job(index, line | defaults)")],
    "dit_accel/cli/progress.py": [
        ("pace-from-nothing", "the speed counts only images made since the command began", "tests/cli/test_progress.py",
         "/ (done - before) *", "/ done *"),
        ("steps-of-a-run-are-lost", "the work of a run counts when the next one begins", "tests/cli/test_progress.py",
         "self._done, self._of_run = self._done + self._of_run, 0.0", "self._of_run = 0.0")],
    "dit_accel/serving/failures.py": [
        ("host-memory-is-any-error", "an error for lack of host memory comes with advice", "tests/cli/test_cli.py",
         "return has_text or isinstance(error, MemoryError | torch.OutOfMemoryError)",
         "return isinstance(error, MemoryError | torch.OutOfMemoryError)")],
    "dit_accel/serving/loading.py": [
        ("whole-models-are-refused", "quantised models can be offloaded as a whole", "tests/serving/test_loading.py",
         'if self.offload == "sequential":', 'if self.offload != "none":')],
    "dit_accel/serving/loras.py": [
        ("loras-of-the-last-job", "a job without LoRAs has the plain model", "tests/serving/test_loras.py",
         "layer.enable_adapters(bool(weights))", "layer.enable_adapters(True)"),
        ("all-loras-stay", "the least used LoRAs leave the device", "tests/serving/test_loras.py",
         "if sum(self._bytes.values()) > MOST_BYTES:", "if False:")],
    "dit_accel/serving/media.py": [
        ("some-names-are-free", "files of an earlier run are replaced only with --force",
         "tests/serving/test_outputs.py",
         "if not any(file.exists() for path in paths for file in files(path)))",
         "if not all(file.exists() for path in paths for file in files(path)))"),
        ("model-rate-over-option", "--fps overrides the model's rate", "tests/cli/test_pipelines.py",
         "Clips(fps or model_fps or", "Clips(model_fps or fps or")],
    "dit_accel/tools/advise/cards.py": [
        ("laptops-are-cards", "a laptop's GPU is not the desktop card of the same name", "tests/cli/test_recommend.py",
         '{"laptop", "ti",', '{"ti",')],
    "dit_accel/cli/presets.py": [
        ("own-file-is-shipped", "a user's file with a shipped preset's name is checked", "tests/cli/test_cli.py",
         "if str(file) in preset_names() and not file.exists():", "if str(file) in preset_names():")],
    "dit_accel/cli/options.py": [
        ("weight-of-nothing", "a LoRA of weight 0 changes nothing", "tests/serving/test_loras.py",
         "loras[source] = weight", "loras[source] = weight or 1.0"),
        ("training-over-options", "--set overrides the settings of a fine-tuning", "tests/serving/test_loras.py",
         "{**trained_overrides(fitting[0]), **overrides}", "{**overrides, **trained_overrides(fitting[0])}"),
        ("keys-without-a-name", "--set =1 gives a one-line error", "tests/cli/test_refused.py",
         "if not equals or not key.strip():", "if not equals:"),
        ("preset-is-checked-late", "a misspelt preset raises before a model is loaded",
         "tests/cli/test_refused.py",
         '        if name != "none":\n            load_preset(default_preset(name, is_video=False), **overrides)\n',
         "")],
    "dit_accel/cli/inspect.py": [
        ("one-latent-frame-short", "symbols are plotted over their own frame", "tests/cli/test_inspect.py",
         "frames = (len(result) - 1) // factor + 1", "frames = len(result) // factor"),
        ("always-the-middle-layer", "--layer selects the layer whose symbols are plotted", "tests/cli/test_cli.py",
         "drawn = layer or list(symbols)[len(symbols) // 2]", "drawn = list(symbols)[len(symbols) // 2]"),
        ("the-middle-of-the-clip", "the plotted frame is of the plotted latent frame", "tests/cli/test_inspect.py",
         "result[frames // 2 * factor]", "result[len(result) // 2]")],
    "dit_accel/cli/comparison.py": [
        ("few-steps-are-a-run", "times of plain runs with a few steps are scaled to a whole run",
         "tests/cli/test_comparison.py",
         "clock.loop_seconds * side.output.calls / clock.calls", "clock.loop_seconds")],
    "dit_accel/cli/parallel.py": [
        ("alone-in-parallel", "--parallel ulysses=1 is an error", "tests/cli/test_parallel.py",
         "if needed != ranks() or needed == 1:", "if needed != ranks():")],
    "dit_accel/serving/outputs.py": [
        ("tried-files-stay", "checking whether a file can be written leaves none behind",
         "tests/cli/test_refused.py",
         "            target.unlink()\n", "            pass\n")],
    "dit_accel/serving/pipelines.py": [
        ("guidance-of-the-first-kind", "--guidance alone is FLUX's distilled guidance", "tests/cli/test_refused.py",
         'and ("negative-prompt" in values or "true_cfg_scale" in arguments)', ""),
        ("options-twice", "--call steps together with --steps is an error", "tests/cli/test_refused.py",
         "if name in taken or name in SET_BY_US:", "if name in SET_BY_US:")],
    "dit_accel/cli/compare.py": [
        ("each-prompt-same-seed", "every prompt of a comparison has its own noise", "tests/cli/test_options.py",
         "Prompt(text, options.seed + index)", "Prompt(text, options.seed)"),
        ("calibrated-on-a-compared-prompt", "methods are calibrated on a prompt that is not compared",
         "tests/cli/test_compare.py",
         " for text in tuning_prompts(options.model) if text not in texts)",
         " for text in tuning_prompts(options.model))")],
    "dit_accel/cli/tune.py": [
        ("tune-replaces-its-base", "tune never overwrites the preset that it starts from", "tests/cli/test_refused.py",
         "os.path.realpath(options.preset) == os.path.realpath(output)", "options.preset == output")],
    "dit_accel/cli/web_texts.py": [
        ("page-shows-markup", "notes appear on the page as text, never as markup", "tests/cli/test_web_page.py",
         "*map(html.escape, notes)", "*notes")],
})
