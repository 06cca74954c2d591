"""Mixtures of experts in graphs, however a model spells them: as one operation, or as sparse regions where they are pruned."""
