"""TorchSparse's settings. Those of its kernels are stored but ignored; `downsample_mode` is checked."""

from types import SimpleNamespace
from typing import Any

from gossamer.dialects.errors import OptionError

_switches = {"conv_mode": 0, "kmap_mode": "hashmap_on_the_fly", "downsample_mode": "spconv"}


def get_conv_mode() -> Any:
    """Returns the argument of `set_conv_mode`."""
    return _switches["conv_mode"]


def set_conv_mode(conv_mode: Any) -> None:
    """Stores TorchSparse's choice of kernels, which is ignored."""
    _switches["conv_mode"] = conv_mode


def get_kmap_mode() -> Any:
    """Returns the argument of `set_kmap_mode`."""
    return _switches["kmap_mode"]


def set_kmap_mode(kmap_mode: str) -> None:
    """Stores TorchSparse's way to find neighbours, which is ignored."""
    _switches["kmap_mode"] = kmap_mode


def get_downsample_mode() -> Any:
    """Returns "spconv", the only mode."""
    return _switches["downsample_mode"]


def set_downsample_mode(downsample_mode: str) -> None:
    """Accepts "spconv": a stride leads to all sites that the window reaches. OptionError for "minkowski"."""
    if downsample_mode != "spconv":
        raise OptionError(
            f"downsample_mode is {downsample_mode!r}, must be 'spconv': a stride leads to all sites that its window reaches"
        )


def get_default_conv_config(conv_mode: Any = None, training: bool = False) -> SimpleNamespace:
    """Returns TorchSparse's default settings of its kernels, which are ignored."""
    return SimpleNamespace(kmap_mode="hashmap_on_the_fly", downsample_mode="spconv", ifsort=False, split_mask_num=1)


_global_config: list[Any] = [None]


def get_global_conv_config() -> Any:
    """Returns the argument of `set_global_conv_config`."""
    return _global_config[0]


def set_global_conv_config(conv_config: Any) -> None:
    """Stores settings of TorchSparse's kernels, which are ignored, except for the downsample_mode."""
    set_downsample_mode(getattr(conv_config, "downsample_mode", "spconv"))
    _global_config[0] = conv_config


def clear_global_conv_config() -> None:
    """Clears the argument of `set_global_conv_config`."""
    _global_config[0] = None
