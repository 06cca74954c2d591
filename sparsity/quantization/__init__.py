"""Makes a quantized model of a sparse one: layers with integer weights."""
