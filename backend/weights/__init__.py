"""Products with static weights: decides which become sparse, and which of them form chains."""
