"""Compiles one of Dynamo's graphs for the current grad mode. `entry.py` calls `Compiler.compile`.

Gossamer compiles the sparse regions. Inductor compiles the dense part, or torch runs it op by op (see `dense.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from gossamer.backend.dense import eagerly, has_cpp_compiler, has_triton_for, with_inductor
from gossamer.backend.devices.trial import Trial
from gossamer.backend.devices.unproven import stays_dense
from gossamer.backend.embeddings.has_sparse_gradients import has_sparse_gradients
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.report.options import MEASURING, Options
from gossamer.backend.rewrite import SparseRewrite
from gossamer.backend.run.bare_code import bare
from gossamer.backend.run.lifetime import keep_with
from gossamer.backend.smaller.compile import compile_smaller
from gossamer.backend.structures import kronecker_weights
from gossamer.backend.structures.rewrite import use_factors
from gossamer.backend.whole_graphs import faster_version
from gossamer.dialects.errors import CompileError, GossamerError
from gossamer.runtime.modules.given_back import give_back
from gossamer.runtime.torch_internals import off
from gossamer.runtime.torch_names import INDUCTOR


@dataclass(frozen=True)
class Compiler:
    """Compiles graphs with these options and this mode of torch.compile."""

    options: Options
    mode: str | None

    def compile(self, module: fx.GraphModule, values: Sequence[Any], *, pure: bool = False) -> Callable[..., Any]:
        """Returns a function that takes the placeholders' values and returns a sequence, as the module does.

        values  example inputs: real tensors, or fake ones if Dynamo's notes have the real static tensors
        pure    raise `Impure` for a graph whose results are not a function of the inputs alone

        Before the graph passes run:
        - Look-ups in tables with sparse gradients are taken out of the graph.
        - The factors of structured matrices replace these matrices.
        - Layers with empty rows or columns become smaller layers.

        If a graph cannot be compiled, or torch cannot trace it, the graph runs as without torch.compile, with a warning. With
        the option `strict`, raises the error instead.
        """
        compile_ = partial(self._compile, pure=pure)
        if stays_dense(values, self.options):
            return compile_(module, values)
        if has_sparse_gradients(module.graph):
            from gossamer.backend.embeddings.sparse_tables import compile_apart  # loads kernels that other models do not need

            try:
                apart = compile_apart(module, values, compile_, partial(self.compile, pure=pure))
            except CompileError as error:  # torch cannot trace sparse gradients either
                if self.options.strict:
                    raise
                SparseRewrite(Inputs.of(module, values), self.options, measuring=False, pure=pure).give_up(error)
                return module.forward
            if apart is not None:
                return apart

        def smaller(module: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
            use_factors(module, Inputs.of(module, values), self.options)
            return compile_smaller(module, values, self.options, compile_)

        return compile_smaller(module, values, self.options, smaller, kronecker_weights.plan)

    def _compile(self, module: fx.GraphModule, values: Sequence[Any], *, pure: bool) -> Callable[..., Any]:
        return faster_version(module, values, self.options, partial(self._version, module, values, pure))

    def _version(self, module: fx.GraphModule, values: Sequence[Any], pure: bool, trial: Trial | None) -> Callable[..., Any]:
        """Compiles a graph. If the predicted gain of its convolutions is close to 1, the trial decides about them."""
        options, mode, inputs = self.options, self.mode, Inputs.of(module, values)
        measuring = options.max_autotune or mode in MEASURING
        rewrite = SparseRewrite(inputs, options, measuring=measuring, pure=pure, trial=trial)
        inductor = options.dense == "auto" and not options.check and has_cpp_compiler() and has_triton_for(values)
        try:
            if (inductor or options.dense == "inductor") and not off(INDUCTOR):
                compiled = with_inductor(module, values, rewrite, mode or (MEASURING[-1] if options.max_autotune else None))
            else:
                compiled = eagerly(module, values, rewrite)
        except (GossamerError, ValueError) as error:  # operations that only eager code has, or views that torch cannot trace
            if options.strict:
                raise
            rewrite.give_up(error)
            return module.forward
        called = rewrite.finish()
        keep_with(compiled, called)
        if rewrite.is_pure:
            compiled = bare(compiled)
        if called:
            give_back()
        return compiled
