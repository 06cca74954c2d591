"""Products with static weights: which become sparse, which of them make chains."""
