"""Mistakes in `dit_accel/stages`: several inputs, encoders, images and ranks, and what stays after the end."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/stages/prompts.py": [
        ("one-output-goes", "one large output may replace several", "tests/stages/test_prompts.py",
         "            while self.size > self.most:", "            if self.size > self.most:"),
        ("outputs-outlive-the-stage", "a closed stage frees its outputs", "tests/stages/test_prompts.py",
         "self.store.forget(self)\n            self._stand_in.leave()", "self._stand_in.leave()"),
        ("the-largest-input", "the bytes of all inputs are limited together", "tests/stages/test_prompts.py",
         "sum(tensor.nbytes for tensor in self.tensors)", "max((tensor.nbytes for tensor in self.tensors), default=0)"),
        ("an-encoder-that-writes", "no output of an encoder that writes to its inputs is kept",
         "tests/stages/test_prompts.py",
         '            self.store.forget(self)\n            reason = "it writes', '            reason = "it writes'),
        ("autocast-of-another-call", "outputs under other modes of torch are kept apart",
         "tests/stages/test_prompts.py",
         "inputs.digest(), _modes(inputs.tensors))", "inputs.digest())"),
        ("inputs-of-another-dtype", "inputs of equal bytes and another dtype are other inputs",
         "tests/stages/test_prompts.py",
         "return value.shape, value.stride(), value.dtype, value.device",
         "return value.shape, value.stride(), value.device"),
        ("the-model-before-stays", "a kept output offloads the model that ran before", "tests/stages/test_prompts.py",
         "            previous.offload()", "            pass")],
    "dit_accel/stages/decode.py": [
        ("graphs-keep-their-memory", "a decode that lacks memory frees graphs of steps", "tests/stages/test_decode.py",
         "            StepGraphs.lend_all()\n            return", "            return"),
        ("a-closed-stage-begins", "a closed stage does nothing at the beginning of a call",
         "tests/stages/test_decoding_in_pipelines.py",
         "        self.parts.at_beginning.clear()\n", ""),
        ("a-closed-stage-shares", "a closed stage's ranks share no decode",
         "tests/stages/test_decoding_in_pipelines.py",
         "            coder.sharing = [other for other in coder.sharing if other is not self]\n", ""),
        ("the-encoder-stays-fused", "both coders of an autoencoder are given back",
         "tests/stages/test_decoding_in_pipelines.py",
         "        fused, self._fused = self._fused, []\n        for coder in fused:",
         "        fused, self._fused = self._fused, []\n        for coder in fused[:1]:"),
        ("the-first-image-counts", "an error in any image of a batch is noticed", "tests/stages/test_decode.py",
         "error = ((output.float() - expected.float()).norm() / expected.float().norm()",
         "error = ((output[:1].float() - expected[:1].float()).norm() / expected[:1].float().norm()"),
        ("an-output-of-another-dtype", "an image of another dtype does not replace the decoder's",
         "tests/stages/test_decode.py",
         "if output.shape != expected.shape or output.dtype != expected.dtype:", "if output.shape != expected.shape:"),
        ("a-form-of-any-dtype", "latents of another dtype are compared anew", "tests/stages/test_decode.py",
         "((item.shape, item.dtype, item.device) if isinstance", "((item.shape, item.device) if isinstance")],
    "dit_accel/stages/stamps.py": [
        ("the-first-buffer", "each buffer of an encoder is compared", "tests/stages/test_stamps.py",
         "[*self.buffers, *self.parts])", "self.buffers[:1] + self.parts)")],
    "dit_accel/stages/rows.py": [
        ("bands-of-one-height", "bands weigh by their rows in the moments of a group", "tests/stages/test_sharing.py",
         "shares = mean.new_tensor(self._heights).view(-1, 1, 1) / self._ends[-1]",
         "shares = torch.ones_like(mean) / self._ranks.count")],
    "dit_accel/stages/vae/autoencoder_kl.py": [
        ("biases-in-half", "biases are added in float32", "tests/stages/test_autoencoders.py",
         ".sum(0, dtype=torch.float32)", ".sum(0)")],
    "dit_accel/stages/vae/layers.py": [
        ("frames-are-square", "attention inside frames that are not square", "tests/stages/test_autoencoders.py",
         "item.shape[3] * item.shape[4] for item", "item.shape[3] * item.shape[3] for item")],
})
