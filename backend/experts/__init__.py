"""Replaces mixtures of experts in graphs by one operation, or by sparse regions if their weights are pruned.

The pass is `routed_experts`. It recognises layers by what they compute, however a model spells them. A row of an operand
belongs to a pair: a token and one of the experts that it chose.
"""
