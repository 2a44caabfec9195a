"""Mistakes in `dit_accel/loop`: choice of computed steps, and forecasts."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/loop/accounts.py": [
        ("memory-is-the-latest", "the report has the peak memory of the caches", "tests/loop/test_controller.py",
         "max(report.cache_bytes, device)", "device"),
        ("prompt-error-is-the-latest", "a prompt's error is its worst branch's",
         "tests/loop/test_per_prompt.py tests/loop/test_controller.py",
         "errors[-1] = max(error, errors[-1] or 0.0)", "errors[-1] = error"),
        ("prompts-share-work", "a prompt's computed fraction counts only its own computed steps",
         "tests/loop/test_per_prompt.py",
         "computed if place in call.computing else 0.0", "computed"),
        ("error-of-latest-output", "a step names the output of its largest error", "tests/loop/test_outputs.py",
         "if output is not None and error >= (self.step.error or 0.0):", "if output is not None:"),
        ("budget-met-exactly", "caches may fill the budget", "tests/loop/test_memory.py",
         "device > self._budget_gib * GIB", "device >= self._budget_gib * GIB"),
        ("density-of-the-last-branch", "a layer's density is that of all branches of the step",
         "tests/loop/test_controller.py tests/loop/test_report.py",
         "(before + computed) / (before_plain + plain)", "computed / plain")],
    "dit_accel/loop/moves.py": [
        ("moves-from-the-start", "image-to-image uses only the moves of the steps that run",
         "tests/loop/test_moves.py tests/loop/test_tracker.py",
         "timesteps = scheduler.timesteps[first:]", "timesteps = scheduler.timesteps"),
        ("somewhat-linear", "a scheduler that clips or adds noise in a step has no moves", "tests/loop/test_moves.py",
         "if linear.all()", "if linear.any()"),
        ("noise-stays-in-the-moves", "a step's noise does not hide the moves of its outputs",
         "tests/loop/test_moves.py",
         "course.append(stepped[0] - stepped[1] if len(stepped) > 1 else stepped[0])", "course.append(stepped[0])")],
    "dit_accel/loop/rows.py": [
        ("samples-in-order-of-parts", "a batch keeps the order of its samples", "tests/loop/test_per_prompt.py",
         "places = sorted((row", "places = list((row")],
    "dit_accel/loop/forecast.py": [
        ("share-of-first-tensor", "the share of the slope fits all tensors of an output",
         "tests/loop/test_closed_loop.py",
         "return sum(along[1:], along[0]) / sum(square[1:], square[0])", "return along[0] / square[0]"),
        ("error-of-the-mean-sample", "a forecast error is that of the worst sample", "tests/loop/test_closed_loop.py",
         "missed / value.norm(dim=1)).max()", "missed / value.norm(dim=1)).mean()"),
        ("taylor-without-factorial", "TaylorSeer's forecast follows its equation 3 at any degree",
         "tests/loop/test_forecast.py",
         "distance**order / math.factorial(order)", "distance**order / max(order, 1)"),
        ("nearest-degree-below", "a fractional degree adds that fraction of the next higher term",
         "tests/loop/test_forecast.py",
         "below = int(order)", "below = round(order)")],
    "dit_accel/loop/growth.py": [
        ("response-points-away", "the model's response to a shift of the latents reduces the shift",
         "tests/loop/test_growth.py",
         "response = math.copysign(RESPONSE, sum(moves[-1])) if moves else -RESPONSE",
         "response = math.copysign(RESPONSE, -sum(moves[-1])) if moves else RESPONSE")],
    "dit_accel/loop/timing.py": [
        ("open-parts-stay", "an aborted call does not change the times of the next",
         "tests/models/test_component_times.py",
         "        self._open.clear()\n", ""),
        ("the-last-call-of-a-part", "all calls of a component count in its time",
         "tests/models/test_component_times.py",
         "found[name] = found.get(name, 0.0) + seconds()", "found[name] = seconds()")],
    "dit_accel/loop/storage.py": [
        ("rows-are-a-view", "skipped rows take no memory", "tests/loop/test_memory.py",
         "keep(tensor[:, self._rows].clone())", "keep(tensor[:, self._rows])"),
        ("adopt-first-tensor", "a history in another form keeps all tensors of a value", "tests/loop/test_memory.py",
         "tuple([storage.keep(part.read()) for part in value])", "(storage.keep(value[0].read()),)"),
        ("scales-of-whole-lines", "expected memory counts the scale of a cut line", "tests/loop/test_memory.py",
         "4 * math.ceil(elements / SCALED_VALUES)", "4 * (elements // SCALED_VALUES)")],
    "dit_accel/loop/interval.py": [
        ("warm-up-one-longer", "the step after the warm-up is an UPDATE", "tests/loop/test_closed_loop.py",
         "step < schedule.warmup or", "step <= schedule.warmup or")],
    "dit_accel/loop/budget.py": [
        ("budget-left-over", "steps that errors do not need compute at the end", "tests/loop/test_budget.py",
         "self.left >= self._steps - step and", "self.left > self._steps - step + 1 and"),
        ("a-floor-that-time-lowers-in-silence", "the report says if max_seconds was too short for target_psnr",
         "tests/loop/test_budget.py",
         "        elif self._floor:\n            self.note(CUT)\n", ""),
        ("time-without-decoding", "a deadline leaves the time of decoding", "tests/loop/test_budget.py",
         "self._limit = seconds - after", "self._limit = seconds")],
    "dit_accel/loop/closed_loop.py": [
        ("moves-have-a-sign", "the lasting part of an output counts by its absolute value",
         "tests/loop/test_controller.py",
         "if abs(end[step]) <=", "if end[step] <="),
        ("whole-slope-is-damped", "a slope that fits exactly gives a forecast of degree 1 without damping",
         "tests/loop/test_controller.py",
         "fitted if fitted != 1.0 else None", "fitted"),
        ("intervals-widen-freely", "an interval is at most WIDENING times the one before",
         "tests/loop/test_closed_loop.py",
         "WIDENING * latest)", "WIDENING * step)"),
        ("first-branch-is-guided", "guided damping needs a second branch in a step", "tests/loop/test_closed_loop.py",
         "len(self._asking) > 1", "len(self._asking) > 0"),
        ("branches-ask-as-one", "each branch asks for the mode by itself", "tests/loop/test_controller.py",
         "self.gap.mode(step, id(self))", "self.gap.mode(step)"),
        ("first-shape-only", "records are dropped if any output changes its shape", "tests/loop/test_closed_loop.py",
         "return [part.shape for part in output] != [part.shape for part in newest]",
         "return output[0].shape != newest[0].shape")],
    "dit_accel/loop/report.py": [
        ("notes-repeat", "the report has each note once", "tests/loop/test_report.py tests/loop/test_controller.py",
         "if remark not in self.notes:", "if remark:")],
    "dit_accel/loop/memory.py": [
        ("lowest-order-first", "a budget lowers the order no more than necessary", "tests/loop/test_memory.py",
         "in reversed(range(preset.forecast.order))", "in range(preset.forecast.order)"),
        ("budget-is-never-full", "a plan that fills the budget exactly fits", "tests/loop/test_memory.py",
         "plan.device_bytes <= budget * GIB", "plan.device_bytes < budget * GIB")],
    "dit_accel/loop/tracker.py": [
        ("guessed-start-begins-anew", "a run whose start was guessed right continues", "tests/loop/test_tracker.py",
         "index > self._latest + 1)", "index > self._latest)"),
        ("null-steps-are-stages", "steps of no length are no second stages", "tests/loop/test_tracker.py",
         "strict=True) if moves))", "strict=True)))")],
    "dit_accel/loop/controller.py": [
        ("least-mode-of-a-batch", "a call computes if any of its samples does", "tests/loop/test_per_prompt.py",
         "mode = max(modes, key=MODES_BY_WORK.index)", "mode = min(modes, key=MODES_BY_WORK.index)")],
    "dit_accel/loop/copies.py": [
        ("replaced-step-is-not-copied", "a trial changes no variable of a user's step", "tests/loop/test_moves.py",
         "cell.cell_contents = within(original.cell_contents)", "cell.cell_contents = original.cell_contents")],
    "dit_accel/loop/branches.py": [
        ("conditioning-forgotten", "a second change of the conditioning is seen at once",
         "tests/loop/test_controller.py",
         "            renewed.conditioning = known.conditioning  # it knows which items held their value\n", ""),
        ("all-samples-computed", "a forecast sample is as old as its latest computed step",
         "tests/loop/test_controller.py",
         "for place in call.computing:", "for place in range(len(call.modes)):")],
    "dit_accel/loop/conditioning.py": [
        ("strides-unread", "a transposed view of the same memory is another value", "tests/loop/test_conditioning.py",
         "!= 0 and value.stride() == before.stride()", "!= 0")],
    "dit_accel/loop/outputs.py": [
        ("first-loop-restarts", "all outputs begin anew together", "tests/loop/test_outputs.py",
         "        for loop in self._loops:\n            loop.restart()",
         "        for loop in self._loops[:1]:\n            loop.restart()"),
        ("outputs-that-never-came", "an output that the transformer leaves out is not forecast",
         "tests/loop/test_outputs.py",
         "self._used = len(parts)", "self._used = len(self._loops)")],
    "dit_accel/loop/branch.py": [
        ("first-loop-of-batch-adopts", "a smaller memory plan holds for all prompts", "tests/loop/test_memory.py",
         "            for loop in self.loops:\n                loop.adopt(memory.order)",
         "            for loop in self.loops[:1]:\n                loop.adopt(memory.order)"),
        ("fetch-the-same-site", "the records of the next block are copied ahead", "tests/loop/test_memory.py",
         "names.index(name) + 1", "names.index(name)")],
    "dit_accel/models/runs.py": [
        ("reset-forgotten", "a reset in a call takes effect after it", "tests/models/test_runs.py",
         "while self._due and not self._is_changing and self._reserve():", "while False:"),
        ("threads-pile-up", "ended threads leave no records", "tests/models/test_runs.py",
         "                self._of_threads = {item: kept for item, kept in self._of_threads.items() if item in"
         " alive}\n",
         "")],
    "dit_accel/loop/trajectory.py": [
        ("edits-of-the-first-sample", "replaced latents of any sample are noticed", "tests/loop/test_trajectory.py",
         "for rows in _equal_rows(now):", "for rows in _equal_rows(now)[:1]:"),
        ("latents-are-a-view", "latents that a pipeline changes in place are compared with their values before",
         "tests/loop/test_trajectory.py",
         ".to(torch.float32, copy=True)", ".float()")],
})
