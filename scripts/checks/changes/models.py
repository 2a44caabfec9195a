"""Mistakes in `dit_accel/models`: the parts of a model that acceleration touches."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/models/samples.py": [
        ("named-branch-is-doubled", "two prompts of a named branch stay separate, even with equal noise",
         "tests/loop/test_per_prompt.py",
         "_repetitions(latents, context) if context in (None, UNCONDITIONAL_FIRST) else 1",
         "_repetitions(latents, context)"),
        ("one-for-all-is-cut", "an argument with one entry for all samples is passed unchanged",
         "tests/loop/test_per_prompt.py",
         "leaf.ndim > 0 and len(leaf) == batch", "leaf.ndim > 0"),
        ("masks-are-never-read-again", "a mask modified in place has new lengths", "tests/models/test_text_lengths.py",
         "if known is None or known[0] != version:", "if known is None:"),
        ("empty-prompts-have-no-token", "an empty prompt runs without NaN", "tests/models/test_text_lengths.py",
         "dtype=torch.int32).clamp(min=1)", "dtype=torch.int32)"),
        ("first-lengths", "samples that compute have their own prompts' lengths", "tests/models/test_text_lengths.py",
         "tuple(self.lengths[row] for row in rows)", "self.lengths[: len(rows)]"),
        ("listed-for-all", "a list with one entry for all samples is passed whole", "tests/loop/test_per_prompt.py",
         "isinstance(value, list) and len(value) == batch:\n            return",
         "isinstance(value, list):\n            return"),
        ("an-unclear-batch-is-divided", "a batch that may have two or three parts is not divided",
         "tests/loop/test_per_prompt.py",
         "return max(fitting) if context", "return min(fitting) if context")],
    "dit_accel/models/block_costs.py": [
        ("probe-is-free", "the probe's dense rows count as computed",
         "tests/models/test_block_costs.py tests/sparse/test_tile_site.py",
         "1 - densities.attended - tiles.probed", "1 - densities.attended"),
        ("samples-apart-count-whole", "attention run sample by sample reports the mean of the skipped shares",
         "tests/models/test_block_costs.py",
         "tiles.probed) / len(states)", "tiles.probed)")],
    "dit_accel/models/beside/other_caches.py": [
        ("cache-dit-is-overlooked", "a cache of cache-dit is refused", "tests/models/test_other_caches.py",
         'getattr(transformer, "_is_cached", False)', 'getattr(transformer, "is_cached", False)'),
        ("a-wrapped-cache-is-overlooked", "a cache beneath another wrapper is refused",
         "tests/models/test_other_caches.py",
         'forward = getattr(forward, "__wrapped__", None)', "forward = None")],
    "dit_accel/models/beside/control_net.py": [
        ("control-net-of-any-form", "a control net called with other shapes returns other shapes",
         "tests/models/test_control_net.py",
         "or known is None or known[0] != form", "or known is None"),
        ("control-net-flags", "a control net called with another flag follows that flag",
         "tests/models/test_control_net.py",
         "leaf if isinstance(leaf, bool) else type(leaf)", "type(leaf)"),
        ("deferred-calls-run-again", "a deferred call runs once, even if several of its tensors are read",
         "tests/models/test_control_net.py",
         "pytree.tree_leaves(self._run()), None", "pytree.tree_leaves(self._run()), self._run"),
        ("a-net-of-another-pipeline", "restoring leaves the hook of another pipeline on a shared ControlNet",
         "tests/models/test_control_net.py",
         "if still is not None and find_hook(still) is ours:", "if still is not None:")],
    "dit_accel/models/token_order_hook.py": [
        ("order-of-another-grid", "tokens of another video run in that video's order",
         "tests/models/test_token_order_hook.py",
         "key = grid, x.device, undo", "key = x.device, undo")],
    "dit_accel/models/component_times.py": [
        ("failed-parts-stay-open", "an exception in a component leaves the times of later calls correct",
         "tests/models/test_component_times.py",
         "always_call=True", "always_call=False")],
    "dit_accel/models/stand_in.py": [
        ("an-own-method-is-lost", "a pipeline's replaced method is put back", "tests/models/test_component_times.py",
         "            else:\n                setattr(holder, self._name, self._replaced)\n", "")],
    "dit_accel/models/families/family.py": [
        ("second-attention-is-cheap", "FLOPs equal torch's count", "tests/models/test_facts.py",
         "8 * batch * others * width**2", "4 * batch * others * width**2"),
        ("output-is-as-wide-as-input",
         "expected memory fits the outputs of a model with fewer output than input channels",
         "tests/loop/test_memory.py",
         "output // in_channels * out_channels * patch", "output")],
    "dit_accel/models/families/qwen_image.py": [
        ("layers-of-the-last-image", "the extra conditioning image does not enter the error",
         "tests/models/test_facts.py",
         "count = len(images) - 1 if", "count = len(images) if")],
    "dit_accel/models/families/wan.py": [
        ("given-frames-are-judged", "given frames do not enter the error", "tests/models/test_facts.py",
         "denoised = (timestep > 0)", "denoised = (timestep >= 0)")],
    "dit_accel/models/families/ltx.py": [
        ("given-tokens-are-judged", "given tokens do not enter the error", "tests/models/test_facts.py",
         "return output * (timestep > 0)", "return output * (timestep >= 0)")],
    "dit_accel/models/families/lumina2.py": [
        ("lumina-shortest-prompt", "a batch is as long as its longest prompt", "tests/models/test_facts.py",
         'text = max(_masks.lengths(arguments["encoder_attention_mask"]).lengths)',
         'text = min(_masks.lengths(arguments["encoder_attention_mask"]).lengths)')],
    "dit_accel/models/part_hook.py": [
        ("warm-up-is-not-remembered", "blocks keep the outputs of the warm-up", "tests/models/test_facts.py",
         "if call.records:", "if call.mode is StepMode.UPDATE:")],
    "dit_accel/models/parallel/context_parallel.py": [
        ("one-share-too-long", "every token belongs to exactly one rank", "tests/models/test_context_parallel.py",
         "(rank < count % ranks)", "(rank <= count % ranks)"),
        ("exchange-of-another-order", "ranks exchange tokens in the order of the call",
         "tests/models/test_context_parallel.py",
         "if latest != key or of_order is not order:", "if latest != key:")],
    "dit_accel/models/graphs/collectives.py": [
        ("written-collectives-are-cut", "an in-place collective is refused during capture",
         "tests/models/test_collectives.py",
         "or function._schema.is_mutable or kwargs", "or kwargs")],
    "dit_accel/models/families/wan_relatives.py": [
        ("diffusion-forcing-in-another-order", "diffusion forcing keeps the order of tokens",
         "tests/models/test_token_order_hook.py",
         'arguments.get("enable_diffusion_forcing") or transformer', "transformer")],
    "dit_accel/models/conditions.py": [
        ("guider-unread", "a guider's scales are conditions", "tests/models/test_conditions.py",
         'for owner in (pipeline, getattr(pipeline, "guider", None)):', "for owner in (pipeline,):"),
        ("adapters-read-once", "an adapter that is loaded during a run is noticed", "tests/models/test_conditions.py",
         "if loaded != self._loaded:", "if self._loaded is None:")],
    "dit_accel/models/beside/quantized_linears.py": [
        ("int8-for-float8", "a preset in float8 takes over no int8 weights", "tests/models/test_host_weights.py",
         "for layers, state in earlier._states.items() if self.dtype == earlier.dtype else ():",
         "for layers, state in earlier._states.items():"),
        ("weights-freed-in-use", "rounded weights are freed once the GPU has read them",
         "tests/models/test_quantized_linears.py",
         "        self._turns.end()\n        self._weights =", "        self._weights =")],
    "dit_accel/models/beside/host_weights.py": [
        ("old-moved-callback", "weights that a later preset took over leave the device with the model",
         "tests/models/test_host_weights.py",
         "                held.moved = self._moved\n", ""),
        ("weights-that-had-to-return", "weights that had to return to the device stay there under a later preset",
         "tests/models/test_host_weights.py",
         "        self._needed |= earlier._needed\n", ""),
        ("an-error-leaves-weights-between", "if a weight does not fit on the device, all stay on the host",
         "tests/models/test_host_weights.py",
         "            for held in self.values():\n                held.leave(HOST)\n", "")],
    "dit_accel/models/graphs/state.py": [
        ("hooks-are-not-compared", "a hook that is added to a module after the capture is called",
         "tests/models/test_graphs.py",
         "self._dicts[_joined(name, key)] = held[key]", "pass")],
    "dit_accel/models/interceptor.py": [
        ("text-comes-back-in-another-order", "text that was sorted by its mask returns to its places",
         "tests/models/test_interceptor.py",
         "of_text.take_along_dim(order.argsort(dim=1), 1)", "of_text.take_along_dim(order, 1)"),
        ("lengths-at-a-row-of-padding", "key lengths are read at a vision token", "tests/models/test_interceptor.py",
         'attn_mask[:, 0, -1 if tokens.text_first and tokens.padding != "all" else 0]', "attn_mask[:, 0, 0]")],
    "dit_accel/models/graphs/step_graphs.py": [
        ("a-graph-of-other-names", "a call with equal tensors under other names has a graph of its own",
         "tests/models/test_graphs.py",
         "self._device(leaves), structure, forms, modes", "self._device(leaves), forms, modes"),
        ("graphs-lack-memory-again", "graphs are on loan after a decode lacked memory", "tests/models/test_graphs.py",
         "self._lends or is_short(", "is_short(")],
    "dit_accel/models/graphs/cuda_graph.py": [
        ("the-first-watcher-ends-all", "a watched step keeps its filter while another one ends",
         "tests/models/test_cuda_graph.py",
         "if len(self._open) == 1:", "if self._open:")],
    "dit_accel/models/beside/compiled.py": [
        ("an-error-in-compiled-code-unhooks", "an exception in compiled code leaves the hook on the transformer",
         "tests/models/test_compile.py",
         "        finally:\n            transformer.forward = hooked\n",
         "        finally:\n            pass\n        transformer.forward = hooked\n")],
    "dit_accel/models/hooks.py": [
        ("all-hooks-must-follow", "a module with a foreign hook too follows its class's forward",
         "tests/models/test_hooks.py",
         "if any(hook.follows_class for hook in ours)",
         "if len(ours) == len(registry.hooks) and any(hook.follows_class for hook in ours)"),
        ("a-chain-is-left-cut", "hooks around a removed one still run", "tests/models/test_hooks.py",
         "        registry.remove_hook(name, recurse=False)\n        mend_chain(module)\n        if not"
         " registry.hooks:",
         "        registry.remove_hook(name, recurse=False)\n        if not registry.hooks:"),
        ("an-error-beneath-offload", "an error in adding a hook leaves accelerate's offload on the module",
         "tests/models/test_hooks.py",
         "    finally:\n        module.forward = offloading",
         "    finally:\n        pass\n    module.forward = offloading")],
    "dit_accel/pipeline.py": [
        ("half-an-acceleration-stays", "an error in hooking a pipeline leaves no hook", "tests/test_pipeline.py",
         "        except BaseException:\n            acceleration.restore()\n            raise",
         "        except BaseException:\n            raise"),
        ("a-part-of-another-pipeline", "a pipeline that shares one of its transformers stays whole",
         "tests/test_shared_transformers.py",
         "        if others:\n            where", "        if False:\n            where"),
        ("decoding-of-another-pipeline", "each of several pipelines reports its own decoding",
         "tests/stages/test_decoding_in_pipelines.py",
         "next((stage.remark for stage in self._decoding if stage.parts is parts), None)",
         "next((stage.remark for stage in self._decoding), None)")],
})
