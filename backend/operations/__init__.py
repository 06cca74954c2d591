"""Graph passes on operations of SparseTensors: fold and fuse them, and compute products in the cheaper order."""
