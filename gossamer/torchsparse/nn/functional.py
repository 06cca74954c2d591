"""TorchSparse's functions: `import gossamer.torchsparse.nn.functional as F`."""

from gossamer.sparsity.torchsparse import settings as conv_config
from gossamer.sparsity.torchsparse.convolution import conv3d
from gossamer.sparsity.torchsparse.functional import (
    global_avg_pool,
    global_max_pool,
    leaky_relu,
    relu,
    silu,
)
from gossamer.sparsity.torchsparse.points import (
    calc_ti_weights,
    spcount,
    spdevoxelize,
    sphash,
    sphashquery,
    spvoxelize,
)
from gossamer.sparsity.torchsparse.settings import (
    get_conv_mode,
    get_downsample_mode,
    get_kmap_mode,
    set_conv_mode,
    set_downsample_mode,
    set_kmap_mode,
)

__all__ = [
    "calc_ti_weights",
    "conv3d",
    "conv_config",
    "get_conv_mode",
    "get_downsample_mode",
    "get_kmap_mode",
    "global_avg_pool",
    "global_max_pool",
    "leaky_relu",
    "relu",
    "set_conv_mode",
    "set_downsample_mode",
    "set_kmap_mode",
    "silu",
    "spcount",
    "spdevoxelize",
    "sphash",
    "sphashquery",
    "spvoxelize",
]
