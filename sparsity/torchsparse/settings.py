"""TorchSparse's settings of its kernels, which have no meaning here, and its way to find the sites that a stride leads to."""

from types import SimpleNamespace
from typing import Any

from gossamer.dialects.errors import OptionError

_switches = {"conv_mode": 0, "kmap_mode": "hashmap_on_the_fly", "downsample_mode": "spconv"}


def get_conv_mode() -> Any:
    """What `set_conv_mode` was given."""
    return _switches["conv_mode"]


def set_conv_mode(conv_mode: Any) -> None:
    """Chooses among TorchSparse's kernels: no meaning here."""
    _switches["conv_mode"] = conv_mode


def get_kmap_mode() -> Any:
    """What `set_kmap_mode` was given."""
    return _switches["kmap_mode"]


def set_kmap_mode(kmap_mode: str) -> None:
    """Chooses how TorchSparse finds neighbours: no meaning here."""
    _switches["kmap_mode"] = kmap_mode


def get_downsample_mode() -> Any:
    """ "spconv"."""
    return _switches["downsample_mode"]


def set_downsample_mode(downsample_mode: str) -> None:
    """Sites that a stride leads to: "spconv", all that the window reaches. OptionError for "minkowski"."""
    if downsample_mode != "spconv":
        raise OptionError(
            f"downsample_mode is {downsample_mode!r}, must be 'spconv': a stride leads to all sites that its window reaches"
        )


def get_default_conv_config(conv_mode: Any = None, training: bool = False) -> SimpleNamespace:
    """TorchSparse's default settings of its kernels: no meaning here."""
    return SimpleNamespace(kmap_mode="hashmap_on_the_fly", downsample_mode="spconv", ifsort=False, split_mask_num=1)


_global_config: list[Any] = [None]


def get_global_conv_config() -> Any:
    """What `set_global_conv_config` was given."""
    return _global_config[0]


def set_global_conv_config(conv_config: Any) -> None:
    """Settings of TorchSparse's kernels: no meaning here, but for the downsample_mode."""
    set_downsample_mode(getattr(conv_config, "downsample_mode", "spconv"))
    _global_config[0] = conv_config


def clear_global_conv_config() -> None:
    """As if none had been set."""
    _global_config[0] = None
