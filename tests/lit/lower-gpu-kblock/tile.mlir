// A tile of other numbers is refused.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-kblock' --verify-diagnostics

#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 128 : dense, d0 : dense, d1 mod 128 : compressed), posWidth = 32, crdWidth = 16
}>
// expected-error@unknown {{tile [64, 128, 128] is not [128, 128, K] with K a multiple of 8}}
func.func @tile(%x: tensor<?x300xf32>, %w: tensor<200x300xf32, #KB>) -> tensor<?x200xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-kblock", tile = [64, 128, 128]} : (tensor<?x300xf32>, tensor<200x300xf32, #KB>) -> tensor<?x200xf32>
  return %y : tensor<?x200xf32>
}
