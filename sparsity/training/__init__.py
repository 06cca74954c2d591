"""Training with sparse weights: stored sparse, so that a step costs what its nonzeros cost."""
