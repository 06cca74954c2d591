"""The families of schedules by name: those of CPUs and those of GPUs. A new one is a file with its lowering and a line here."""

from gossamer.passes.framework.family import Family
from gossamer.passes.weights.lower_bitmap import BITMAP
from gossamer.passes.weights.lower_block import BLOCK
from gossamer.passes.weights.lower_blockvec import BLOCKVEC
from gossamer.passes.weights.lower_broadcast import BROADCAST
from gossamer.passes.weights.lower_gather import GATHER
from gossamer.passes.weights.lower_kblock import KBLOCK
from gossamer.passes.weights.lower_lookup import LOOKUP
from gossamer.passes.weights.lower_planes import PLANES
from gossamer.passes.weights.lower_rowpairs import ROWPAIRS
from gossamer.passes.weights_bf16.lower_amx import AMX
from gossamer.passes.weights_bf16.lower_amxcolumns import AMXCOLUMNS
from gossamer.passes.weights_bf16.lower_amxexpand import AMXEXPAND
from gossamer.passes.weights_bf16.lower_bf16dot import BF16DOT
from gossamer.passes.weights_bf16.lower_expand import EXPAND
from gossamer.passes.weights_bf16.lower_pairs import PAIRS
from gossamer.passes.weights_gpu.lower_gpu_blocks import GPU_BLOCKS
from gossamer.passes.weights_gpu.lower_gpu_expand import GPU_EXPAND
from gossamer.passes.weights_gpu.lower_gpu_gather import GPU_GATHER
from gossamer.passes.weights_gpu.lower_gpu_kblock import GPU_KBLOCK
from gossamer.passes.weights_gpu.lower_gpu_twofour import GPU_TWOFOUR
from gossamer.passes.weights_gpu.lower_gpu_vnm import GPU_VNM

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        KBLOCK,
        GATHER,
        LOOKUP,
        PLANES,
        BITMAP,
        BROADCAST,
        BF16DOT,
        PAIRS,
        EXPAND,
        AMX,
        AMXCOLUMNS,
        AMXEXPAND,
        BLOCK,
        BLOCKVEC,
        ROWPAIRS,
    )
}
GPU_FAMILIES: dict[str, Family] = {
    family.name: family for family in (GPU_KBLOCK, GPU_GATHER, GPU_BLOCKS, GPU_TWOFOUR, GPU_VNM, GPU_EXPAND)
}
ALL_FAMILIES = FAMILIES | GPU_FAMILIES
