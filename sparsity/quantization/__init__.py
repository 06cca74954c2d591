"""From a sparse model to a quantized one: layers of int8."""
