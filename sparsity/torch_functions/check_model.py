"""Checks that the user's model is a module."""

from typing import Any

from torch import nn

from gossamer.dialects.errors import OptionError


def check_model(model: Any) -> None:
    """OptionError unless the model is a module."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"the model is {type(model).__qualname__}, must be a torch.nn.Module")
