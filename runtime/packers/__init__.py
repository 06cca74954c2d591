"""Makes the arrays of packings from the places of nonzeros. dialects/packing.py and gpu_packings.py define the layouts."""
