// The memory behind the tensors has to be known.
// RUN: gossamer-opt %s -p lower-kblock --verify-diagnostics

// expected-error @unknown {{its result has no buffer, for it is computed and used inside of the region, or expose-storage has not run}}
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 16 : dense, d0 : dense, d1 mod 16 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, #KB>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "kblock", tile = [4, 4, 16]} : (tensor<?x30xf32>, tensor<7x30xf32, #KB>) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
