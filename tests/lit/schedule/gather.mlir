// A weight stored by rows, for a few tokens.
// RUN: gossamer-opt %s -p 'schedule{schedule=gather}' | filecheck %s

// A weight stored by rows: one token after the other, in groups of four.
// CHECK-LABEL: func.func @rows(
// CHECK:         "kernel.spmm"(%arg0, %arg1)
// CHECK:         {lanes = 16 : i64, reduction = 1 : i64, schedule = "gather", tile = [4]} : (tensor<?x64xf32>, tensor<32x64xf32, #sparse>) -> tensor<?x32xf32>
#ROWS = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16}>
func.func @rows(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, #ROWS>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, #ROWS>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}
