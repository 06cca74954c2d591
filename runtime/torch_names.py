"""The table of torch's private names: where each is, what Gossamer uses it for, and which feature is off without it.

torch_internals.py imports them. A name is private if its dotted path has an underscore, or lies in torch.fx.experimental.
Operators such as `torch.ops.aten._to_copy` do not count as private: graphs consist of them, and torch keeps their schemas.
"""

from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

REGIONS = "sparse regions"
CAPTURED = "captured variables as weights"
DYNAMIC = "sizes that are equal whatever they are"
INDUCTOR = "Inductor around sparse regions"
TRITON = "Inductor on GPUs"
OP_BY_OP = "compilation without Inductor"
MODES = "modes of torch.compile"
CACHE = "graphs that an earlier process has compiled"
PORTABLE_CACHE = "our part of torch.compiler.save_cache_artifacts"
LIBRARIES = "libraries of Inductor in our cache"
DIRECT_CALLS = "calls from Inductor's code without torch's dispatcher"
UNTRACED = "the short way past Dynamo"
BARE = "the short way to Inductor's code"
MARKS = "calls without marks for profilers"
LIFETIMES = "freeing what compiled code calls when the code goes"
ALLOCATION = "allocation as Inductor's"
STREAMS = "the short way to CUDA's current stream"
AGAIN = "compiling a graph again for gradients of models in eval mode, or when empty rows have changed"
LOADED = "gossamer.load_package"
PACKAGES = "the warning at packages of AOTInductor, which are dense"
BREAKS = "graph breaks in reports, and warnings of them"
ANEW = "compiling anew what has become sparse, or dense again"
COUNTERS = "our part of torch._dynamo.utils.counters"
SPARSE_TENSORS = "gossamer.SparseTensor"
COMPILED_SIZES = "numbers of entries that are known in a compiled graph only"
EXPORT = "torch.export of what gives a SparseTensor"
WITHOUT_ZEROS = "packages without rows and columns of zeros"
TRANSFORMS = "torch.func on operations of SparseTensors"
DDP = "gossamer.distributed.data_parallel"
EXCHANGE = "gossamer.distributed.ShardedRows"
SHARDED = "a quick look at weights beside FSDP2"
ANY_NUMBER = "batch norm over a number of rows that a compiled graph learns when it runs"
OPTIMIZERS = "compiled steps of optimizers on SparseTensors"
HOOKS = "weights that hooks compute, kept until something changes"
EVAL = "gradients of models in eval mode when they are asked for"
SHORT_WAY = "operations of SparseTensors without torch's dispatcher"
SPARSE_SUM = "torch.sparse.sum of a SparseTensor"
ATTENTION = "attention under masks"
COPIES = "copies of the values of a matrix that is multiplied again"


@dataclass(frozen=True)
class Private:
    """A name that torch does not promise to keep.

    path      where torch has it, as module:attributes
    purpose   what Gossamer uses it for
    feature   the feature that is off without it
    stand_in  the object to use without it; None for a function that raises GossamerError
    changing  whether it is a variable whose value changes; then the import gives its module instead
    """

    path: str
    purpose: str
    feature: str
    stand_in: Any = None
    changing: bool = False


class Absent(Exception):
    """Stands for a missing class: nothing is an instance of it, and nobody raises it."""


def _modes(mode: str | None = None) -> dict[str, Any]:
    return {} if mode else {"default": {}}


def _empty_strided(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


_AOT, _SHAPES = "torch._functorch._aot_autograd.descriptors", "torch.fx.experimental.symbolic_shapes"
_CODEGEN, _FUNCTORCH = "torch._inductor.codegen", "torch._C._functorch"
_CACHES, _FRAMES = "torch.compiler._cache", "torch._C._dynamo.eval_frame"
_ACTIVE = "torch._C:_are_functorch_transforms_active"
_FLEX = "torch._higher_order_ops.flex_attention"
_ATEN = "torch:ops.aten"
_UNCOUNTED = lambda *_: -1
_YES = lambda *_: True

PRIVATE = {
    # Inputs of graphs, and their sizes
    "AOTInput": Private(f"{_AOT}:AOTInput", "any input of a traced graph", REGIONS, Absent),
    "PlainAOTInput": Private(f"{_AOT}:PlainAOTInput", "an argument, by its number", REGIONS, Absent),
    "ParamAOTInput": Private(f"{_AOT}:ParamAOTInput", "a parameter, by its name", REGIONS, Absent),
    "BufferAOTInput": Private(f"{_AOT}:BufferAOTInput", "a buffer, by its name", REGIONS, Absent),
    "SubclassGetAttrAOTInput": Private(f"{_AOT}:SubclassGetAttrAOTInput", "an array of a SparseTensor", REGIONS, Absent),
    "SubclassGetAttrAOTOutput": Private(f"{_AOT}:SubclassGetAttrAOTOutput", "one that is returned", DYNAMIC, Absent),
    "TangentAOTInput": Private(f"{_AOT}:TangentAOTInput", "the gradient of a result", DYNAMIC, Absent),
    "OpOverload": Private("torch._ops:OpOverload", "the type of what nodes call", REGIONS, Absent),
    "FakeTensor": Private("torch._subclasses.fake_tensor:FakeTensor", "inputs without content", REGIONS, Absent),
    "is_fake": Private("torch._subclasses.fake_tensor:is_fake", "likewise", REGIONS, lambda _: False),
    "FakeTensorMode": Private("torch._subclasses.fake_tensor:FakeTensorMode", "shapes of regions", REGIONS, Absent),
    "ShapeEnv": Private(f"{_SHAPES}:ShapeEnv", "regions for any number of tokens", REGIONS, Absent),
    "StatelessSymbolicContext": Private(f"{_SHAPES}:StatelessSymbolicContext", "which size that is", REGIONS, Absent),
    "DimDynamic": Private(f"{_SHAPES}:DimDynamic", "that it is known at run time", REGIONS, Absent),
    "detect_fake_mode": Private("torch._guards:detect_fake_mode", "shapes of new nodes", REGIONS, lambda *_: None),
    "disable_current_modes": Private(
        "torch.utils._python_dispatch:_disable_current_modes", "real numbers while a graph is traced", REGIONS, nullcontext
    ),
    "function_modes": Private(
        "torch._C:_len_torch_function_stack", "a default device, which is for the user's tensors", REGIONS, lambda: 1
    ),
    "enable_python_dispatcher": Private(
        "torch._dispatch.python:enable_python_dispatcher", "open sizes in exported programs", REGIONS, nullcontext
    ),
    "no_python_dispatcher": Private(
        "torch._dispatch.python:no_python_dispatcher", "times of operations while a graph is traced", REGIONS, nullcontext
    ),
    "LocalSource": Private("torch._dynamo.source:LocalSource", "whether an input is captured", CAPTURED, Absent),
    "GlobalSource": Private("torch._dynamo.source:GlobalSource", "whether it is a global", CAPTURED, Absent),
    "statically_known_true": Private(
        f"{_SHAPES}:statically_known_true", "whether symbolic sizes agree", DYNAMIC, lambda known: known is True
    ),
    "guard_or_true": Private(f"{_SHAPES}:guard_or_true", "what to do for sizes of values as for the worst", DYNAMIC, bool),
    "free_unbacked_symbols": Private(
        f"{_SHAPES}:free_unbacked_symbols", "sizes that are known at run time only", DYNAMIC, lambda _: set()
    ),
    "rename_unbacked": Private(
        f"{_SHAPES}:ShapeEnv._rename_unbacked_to", "two names for one of them", DYNAMIC, lambda *_: None
    ),
    "check_in_graph": Private("torch:_check", "what is to hold when a graph runs", DYNAMIC, lambda condition: None),
    # Compilation of everything but our regions
    "compile_fx": Private("torch._inductor.compile_fx:compile_fx", "compilation of the rest", INDUCTOR),
    "compile_fx_inner": Private("torch._inductor.compile_fx:compile_fx_inner", "compilation of a graph", INDUCTOR),
    "get_cpp_compiler": Private("torch._inductor.cpp_builder:get_cpp_compiler", "if it can build", INDUCTOR, lambda: None),
    "select_decomp_table": Private("torch._inductor.decomposition:select_decomp_table", "its decompositions", INDUCTOR, dict),
    "inductor_decompositions": Private("torch._inductor.lowering:decompositions", "its lowerings", INDUCTOR, {}),
    "has_triton": Private("torch.utils._triton:has_triton", "whether Triton is there", TRITON, lambda: False),
    "list_mode_options": Private("torch._inductor:list_mode_options", "what they mean", MODES, _modes),
    "aot_autograd": Private(
        "torch._dynamo.backends.common:aot_autograd", "tracing", OP_BY_OP, lambda **_: lambda module, _: module.forward
    ),
    "inductor_config": Private(
        "torch._inductor:config", "the order of channels in memory", INDUCTOR,
        SimpleNamespace(layout_optimization=True, patch=lambda **_: nullcontext()),
    ),
    # Caches on disk
    "functorch_config": Private(
        "torch._functorch:config", "AOTAutograd's cache", CACHE,
        SimpleNamespace(enable_autograd_cache=False, patch=lambda **_: nullcontext()),
    ),
    "CustomGraphPass": Private("torch._inductor.custom_graph_pass:CustomGraphPass", "our part of its key", CACHE, object),
    "is_traceable_wrapper_subclass": Private(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass", "the inputs in its key", CACHE, lambda _: False
    ),
    "CacheArtifact": Private(f"{_CACHES}:CacheArtifact", "object code as a part", PORTABLE_CACHE, object),
    "CacheArtifactFactory": Private(
        f"{_CACHES}:CacheArtifactFactory", "taking it out", PORTABLE_CACHE, SimpleNamespace(register=lambda kind: kind)
    ),
    "CacheArtifactManager": Private(
        f"{_CACHES}:CacheArtifactManager", "putting it in", PORTABLE_CACHE,
        SimpleNamespace(record_artifact=lambda *_: None),
    ),
    "inductor_directory": Private("torch._inductor.runtime.cache_dir_utils:cache_dir", "where they are", LIBRARIES),
    # Calls
    "CUSTOM_EXTERN_KERNEL_CODEGEN": Private(
        f"{_CODEGEN}.custom_extern_kernel_codegen:CUSTOM_EXTERN_KERNEL_CODEGEN", "who writes a call", DIRECT_CALLS, {}
    ),
    "CustomCodegen": Private(
        f"{_CODEGEN}.custom_extern_kernel_codegen:CustomCodegen", "that we do", DIRECT_CALLS, lambda **_: None
    ),
    "V": Private("torch._inductor.virtualized:V", "what Inductor writes into", DIRECT_CALLS),
    "mark_static": Private("torch._dynamo:mark_static", "code for what has become sparse or dense", ANEW, lambda *_: None),
    "GuardManager": Private("torch._C._dynamo.guards:GuardManager", "whether it sees marks of parameters", ANEW, Absent),
    "set_version_counter": Private(
        "torch._C._autograd:_unsafe_set_version_counter", "what it has written", DIRECT_CALLS, lambda *_: None
    ),
    "CompiledFxGraph": Private("torch._inductor.output_code:CompiledFxGraph", "what it is called by", BARE, Absent),
    "innermost_fn": Private("torch._dynamo.eval_frame:innermost_fn", "what Dynamo keeps", LIFETIMES, lambda _: None),
    "set_code_exec_strategy": Private(
        f"{_FRAMES}:set_code_exec_strategy", "keeping Dynamo out of our Python", UNTRACED, lambda *_: None
    ),
    "FrameExecStrategy": Private(f"{_FRAMES}:_FrameExecStrategy", "frame and callees", UNTRACED, lambda *_: None),
    "FrameAction": Private(f"{_FRAMES}:_FrameAction", "to skip them", UNTRACED, SimpleNamespace(SKIP=None)),
    "empty_strided_cpu": Private(
        "torch._C._dynamo.guards:_empty_strided_cpu", "results in a third of the time", ALLOCATION, _empty_strided
    ),
    "cuda_raw_stream": Private(
        "torch._C:_cuda_getCurrentRawStream", "where kernels are launched", STREAMS,
        lambda index: torch.cuda.current_stream(index).cuda_stream,
    ),
    # Reports
    "counters": Private("torch._dynamo.utils:counters", "graphs and regions, counted", COUNTERS, defaultdict(Counter)),
    "graph_break_reasons": Private("torch._dynamo.utils:graph_break_reasons", "why, and where", BREAKS, []),
    "get_compilation_metrics": Private("torch._dynamo.utils:get_compilation_metrics", "what failed", BREAKS, lambda: []),
    "Unsupported": Private("torch._dynamo.exc:Unsupported", "that a function cannot be traced", BREAKS, Absent),
    "OptimizedModule": Private("torch._dynamo.eval_frame:OptimizedModule", "methods that stay uncompiled", BREAKS, Absent),
    "external_utils": Private("torch._dynamo:external_utils", "the file of its frames around calls", BREAKS, SimpleNamespace()),
    "callback_handler": Private(
        "torch._dynamo.callback:callback_handler", "when a compilation ends", BREAKS,
        SimpleNamespace(end_callbacks=[], register_end_callback=lambda _: None),
    ),
    "ahead_of_time": Private(
        "torch._inductor:aot_compile", "who makes a package", PACKAGES, SimpleNamespace(), changing=True
    ),
    "package_loader": Private("torch._C._aoti:AOTIModelPackageLoader", "what loads one", LOADED),
    "treespec_loads": Private("torch.utils._pytree:treespec_loads", "what it takes and gives", LOADED),
    "treespec_dumps": Private("torch.utils._pytree:treespec_dumps", "what a call gives", LOADED),
    # SparseTensors
    "make_wrapper_subclass": Private("torch:Tensor._make_wrapper_subclass", "a tensor of several", SPARSE_TENSORS),
    "set_throw_on_mutable_data_ptr": Private(
        "torch._C:_set_throw_on_mutable_data_ptr", "errors for who asks for an address", SPARSE_TENSORS
    ),
    "return_and_correct_aliasing": Private(
        "torch.utils._python_dispatch:return_and_correct_aliasing", "in-place arithmetic", SPARSE_TENSORS
    ),
    "sparse_sum": Private("torch:_sparse_sum", "what torch.sparse.sum, a Python function, calls", SPARSE_SUM, torch.sum),
    "is_zerotensor": Private("torch:Tensor._is_zerotensor", "zeros without memory", SPARSE_TENSORS),
    "stored_entries": Private("torch:Tensor._nnz", "how torch.sparse calls them", SPARSE_TENSORS),
    "tree_map_only": Private("torch.utils._pytree:tree_map_only", "arguments in lists", SPARSE_TENSORS),
    "FunctionalTensor": Private(
        "torch._subclasses.functional_tensor:FunctionalTensor", "arrays without content", SPARSE_TENSORS, Absent
    ),
    "SetExcludeDispatchKeyGuard": Private("torch._C:_SetExcludeDispatchKeyGuard", "counting writes", SPARSE_TENSORS),
    "AutoDispatchBelowAutograd": Private("torch._C:_AutoDispatchBelowAutograd", "our own gradients", SPARSE_TENSORS),
    "after_autograd_keyset": Private("torch._C:_after_autograd_keyset", "our own gradients", SPARSE_TENSORS),
    "set_forward_gradients": Private(
        "torch.autograd.forward_ad:_set_fwd_grad_enabled", "our own tangents", SPARSE_TENSORS
    ),
    "TensorVariable": Private("torch._dynamo.variables.tensor:TensorVariable", "what it takes apart", OPTIMIZERS, Absent),
    "OptimizerVariable": Private(
        "torch._dynamo.variables.optimizer:OptimizerVariable", "sizes of parameters", OPTIMIZERS, Absent
    ),
    "foreach_lerp": Private("torch:_foreach_lerp_", "what it takes apart", OPTIMIZERS),
    "traced_stack": Private("torch._guards:TracingContext.extract_stack", "whose step is traced", OPTIMIZERS, list),
    "leave_to_us": Private(
        "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model", "what it does not reduce", DDP
    ),
    "all_to_all": Private(
        "torch.distributed._functional_collectives:all_to_all_single_autograd", "an exchange with gradients", EXCHANGE
    ),
    "module_states": Private(
        "torch.distributed._composable_state:_module_state_mapping", "whether FSDP2 is at work", SHARDED, {None: None}
    ),
    "functions_apart": Private(
        "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers", "what it takes apart", OPTIMIZERS, dict
    ),
    "VariableTracker": Private("torch._dynamo.variables.base:VariableTracker", "tracing ours instead", ANY_NUMBER, Absent),
    "specialize_symnode": Private("torch._dynamo.utils:specialize_symnode", "its epsilon", ANY_NUMBER, lambda value: value),
    "emit_call_in_export": Private("torch._export.wrappers:_emit_flat_apply_call", "a call in it", EXPORT, lambda **_: None),
    "get_proxy_mode": Private(
        "torch.fx.experimental.proxy_tensor:get_proxy_mode", "whether a graph is made", COMPILED_SIZES, _YES
    ),
    "proxies_of_exports": Private(
        "torch.fx.experimental.proxy_tensor:_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", "letting go of the last one", EXPORT, {}
    ),
    "export_to_torch_ir": Private(
        "torch.export._trace:_export_to_torch_ir", "a graph of Dynamo's for it", WITHOUT_ZEROS
    ),
    "compiler_flags": Private(
        "torch.compiler:_is_exporting_flag", "whether it traces", EXPORT, SimpleNamespace(_is_exporting_flag=False),
        changing=True,
    ),
    "layers_of_transforms": Private(  # Dynamo traces the first path from torch 2.13 on
        f"{_FUNCTORCH}:get_dynamic_layer_stack_depth" if torch.__version__ >= "2.13" else _ACTIVE,
        "whether one runs", TRANSFORMS,
    ),
    "transforms_active": Private(_ACTIVE, "whether one runs", TRANSFORMS),
    "is_gradient_batch": Private(
        f"{_FUNCTORCH}:is_legacy_batchedtensor", "several gradients at once (is_grads_batched)", TRANSFORMS, lambda _: False
    ),
    "enter_gradient_batch": Private("torch._C:_vmapmode_increment_nesting", "in which call", TRANSFORMS),
    "leave_gradient_batch": Private("torch._C:_vmapmode_decrement_nesting", "likewise", TRANSFORMS),
    "gradient_batch": Private("torch:_add_batch_dim", "their results", TRANSFORMS),
    "gradients_of_batch": Private("torch:_remove_batch_dim", "each of them", TRANSFORMS),
    "is_functorch_wrapped_tensor": Private(
        f"{_FUNCTORCH}:is_functorch_wrapped_tensor", "what is inside of one", TRANSFORMS, lambda _: False
    ),
    "enable_single_level_autograd_function": Private(
        "torch._functorch.utils:enable_single_level_autograd_function", "derivatives of derivatives", TRANSFORMS
    ),
    "SingleLevelFunction": Private(
        "torch.autograd.function:_SingleLevelFunction", "nodes of one level of them", TRANSFORMS, torch.autograd.Function
    ),
    "temporarily_clear_interpreter_stack": Private(
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", "tensors of outside", TRANSFORMS
    ),
    "has_storage": Private("torch._C:_has_storage", "whether a tensor is memory", SHORT_WAY, lambda _: False),
    "len_torch_dispatch_stack": Private("torch._C:_len_torch_dispatch_stack", "whether a mode watches", SHORT_WAY, _YES),
    "is_torch_function_mode_enabled": Private("torch._C:_is_torch_function_mode_enabled", "likewise", SHORT_WAY, _YES),
    "get_tracing_state": Private("torch._C:_get_tracing_state", "whether torch.jit traces", SHORT_WAY, _YES),
    "peek_interpreter_stack": Private(f"{_FUNCTORCH}:peek_interpreter_stack", "whether torch.func watches", SHORT_WAY, _YES),
    "dynamo_config": Private("torch._dynamo:config", "whether Dynamo's code marks what it does", MARKS),
    "CompileContext": Private("torch._guards:CompileContext", "whether one is being compiled", MARKS, Absent),
    "AttrSource": Private("torch._dynamo.source:AttrSource", "the mode of a module", EVAL, Absent),
    "GuardBuilder": Private("torch._dynamo.guards:GuardBuilder", "that it stays", EVAL, Absent),
    "install_guard": Private("torch._dynamo.guards:install_guard", "that it stays", EVAL, lambda *_: None),
    "dynamo_frames": Private("torch._dynamo.eval_frame:_stance", "whether the user forbids it", ANEW, changing=True),
    "DeletedGuardManagerWrapper": Private(
        "torch._dynamo.guards:DeletedGuardManagerWrapper", "forgetting those of models that are gone", ANEW, Absent
    ),
    "weight_norm": Private("torch:_weight_norm", "what torch.nn.utils.weight_norm calls", HOOKS, Absent),
    "saved_tensors_hooks": Private(
        "torch._C._autograd:_top_saved_tensors_default_hooks", "which tensors a pass saves", EVAL, lambda _: None
    ),
    "set_grad_enabled": Private("torch._C:_set_grad_enabled", "what graphs call", EVAL),
    "TensorifyScalarRestartAnalysis": Private(
        "torch._dynamo.exc:TensorifyScalarRestartAnalysis", "that a float cannot stay open", EVAL, Absent
    ),
    "TracingContext": Private("torch._guards:TracingContext", "what a graph was compiled in", AGAIN, Absent),
    "tracing": Private("torch._guards:tracing", "compiling it again in that", AGAIN, nullcontext),
    "compile_context": Private("torch._guards:compile_context", "likewise", AGAIN, nullcontext),
    "profiler": Private(
        "torch.autograd.profiler:_is_profiler_enabled", "whether a profiler watches", SHORT_WAY,
        SimpleNamespace(_is_profiler_enabled=True), changing=True,
    ),
    "forward_level": Private(
        "torch.autograd.forward_ad:_current_level", "whether tangents are computed", SHORT_WAY,
        SimpleNamespace(_current_level=0), changing=True,
    ),
    # Operators that torch keeps to itself
    "cpu_attention": Private(
        f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu.default", "what SDPA becomes", ATTENTION, Absent
    ),
    "cpu_attention_backward": Private(
        f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu_backward.default", "its gradients", ATTENTION, Absent
    ),
    "flex_attention": Private(
        f"{_FLEX}:flex_attention", "what FlexAttention is in graphs", ATTENTION, Absent
    ),
    "flex_attention_backward": Private(f"{_FLEX}:flex_attention_backward", "its gradients", ATTENTION, Absent),
    "validate_flex_device": Private(
        "torch.nn.attention.flex_attention:_validate_device", "what refuses gradients on CPUs", ATTENTION
    ),
    "InstructionTranslator": Private(
        "torch._dynamo.symbolic_convert:InstructionTranslator", "the backend that is traced for", ATTENTION
    ),
    "flex_in_full": Private(f"{_FLEX}:sdpa_dense", "what it computes", ATTENTION),
    "flex_backward_in_full": Private(f"{_FLEX}:sdpa_dense_backward", "what its gradients are", ATTENTION),
    "make_fx": Private("torch.fx.experimental.proxy_tensor:make_fx", "that as a graph", ATTENTION),
    "tree_flatten": Private("torch.utils._pytree:tree_flatten", "arguments and results in a list", ATTENTION),
    "tree_unflatten": Private("torch.utils._pytree:tree_unflatten", "and back", ATTENTION),
    "tensor_references": Private("torch:Tensor._use_count", "whether others have its values", COPIES, _UNCOUNTED),
    "storage_references": Private("torch._C:_storage_Use_Count", "whether others have their memory", COPIES, _UNCOUNTED),
}  # fmt: skip
