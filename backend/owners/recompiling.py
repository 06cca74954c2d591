"""Whether Dynamo may compile a graph again.

torch.compiler.set_stance("fail_on_recompile")      after the warm-up of a server: its calls must not compile
model.load_state_dict(other_weights)                so later calls keep their graphs, whatever zeros the weights have
"""

from gossamer.runtime.torch_internals import dynamo_config, dynamo_frames

_FORBIDDEN = ("fail_on_recompile", "eager_on_recompile")


def may_recompile() -> bool:
    """Returns False if the user has forbidden it, by torch.compiler.set_stance or in Dynamo's settings."""
    return dynamo_frames._stance.stance not in _FORBIDDEN and not dynamo_config.error_on_recompile
