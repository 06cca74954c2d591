"""The operations `gossamer::…` of torch's dispatcher on SparseTensors: kernels, shapes for tracing, gradients, and vmap."""
