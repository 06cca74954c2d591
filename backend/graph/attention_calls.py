"""Reads attention that is one operation of a graph: its arguments, and the operations for its gradients.

scaled_dot_product(%q, %k, %v, dropout, causal, attn_mask=%m, scale=0.125)    torch's own
gossamer::attend_masked(%q, %k, %v, %m, 0.125, cap, %seed, dropout, own)      with features that torch's does not have
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

from gossamer.backend.graph.nodes import same, users
from gossamer.runtime.torch_internals import cpu_attention, cpu_attention_backward, flex_attention_backward
from gossamer.sparsity.attention.masked_attention import attend_masked, attend_masked_backward, attend_masked_scores

_BACKWARDS = {cpu_attention_backward, flex_attention_backward, attend_masked_backward, attend_masked_scores}


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A call of attention on CPUs.

    operands  queries, keys and values, [batch, heads, tokens, size]
    mask      numbers to add to the scores, or bools that say which keys are seen; None for no mask
    given     the scale; None for the usual one
    causal    whether later keys are hidden

    The other fields are those of a `Scoring`.
    """

    node: fx.Node
    operands: tuple[fx.Node, fx.Node, fx.Node]
    mask: fx.Node | None
    given: float | None
    cap: float | None
    seed: fx.Node | None
    dropout: float
    own: bool
    causal: bool = False

    @classmethod
    def at(cls, node: fx.Node) -> Self | None:
        """Returns the call of a node, or None if it calls no attention."""
        arguments: Any = node.args
        if node.target is attend_masked:
            return cls(node, arguments[:3], *arguments[3:])
        if node.target is not cpu_attention:
            return None
        given: Any = dict(zip(("dropout_p", "is_causal"), arguments[3:], strict=False)) | node.kwargs
        how = given.get("dropout_p", 0.0), False, given.get("is_causal", False)
        return cls(node, arguments[:3], given.get("attn_mask"), given.get("scale"), None, None, *how)

    @property
    def ours(self) -> bool:
        """Whether the call is gossamer::attend_masked, which has features that torch's operation does not have."""
        return self.node.target is attend_masked

    @property
    def values(self) -> list[torch.Tensor]:
        """Fake queries, keys and values."""
        return [operand.meta["val"] for operand in self.operands]

    @property
    def scale(self) -> float:
        """The factor of the products of queries and keys."""
        return float(self.values[0].shape[3] ** -0.5 if self.given is None else self.given)

    @property
    def scoring(self) -> list[Any]:
        """The arguments of a `Scoring`."""
        return [self.scale, self.cap, self.seed, self.dropout, self.own]


def calls(graph: fx.Graph) -> Iterator[AttentionCall]:
    """Yields all calls of attention in a graph, in order. Reads each node only when the iterator reaches it."""
    return (call for node in list(graph.nodes) if (call := AttentionCall.at(node)) is not None)


def gradients_of(attention: fx.Node) -> list[fx.Node]:
    """Returns the operations for the gradients of an attention in a joint graph. They read its result."""
    results = [user for user in attention.users if user.target is operator.getitem]
    readers = (user for result in results for user in users(result) if user.target in _BACKWARDS)
    return list(dict.fromkeys(user for user in readers if same(user.args[4]) in results))
