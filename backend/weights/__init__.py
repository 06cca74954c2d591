"""Graph passes for products with static weights. They decide which products become sparse, and which form chains."""
