// Passes of ours and of MLIR run on one module in the order written: here a contraction is scheduled with options.
// RUN: gossamer-opt %s -p 'cse,choose-format{schedule=broadcast},schedule{bits=256},canonicalize' | filecheck %s

// CHECK-LABEL: func.func @product(
// CHECK:         "kernel.spmm"
// CHECK:         lanes = 8
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @product(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, #CSR>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, #CSR>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}
