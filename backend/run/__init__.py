"""Code that runs at every call of a compiled graph: the operations that call regions, packed weights, sorted edges.

gossamer::region  region_op (finds the region by its key) → compiled_region (plans, runs) → packed_weights (packs and renews)
gossamer::chain   the same, or convolved_row → row_of_kernels for convolutions
edges and masks   message_ops, mask_ops, flex_ops → computed (computes structures again if their leaves change)
"""
