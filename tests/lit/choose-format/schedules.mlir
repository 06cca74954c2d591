// A weight whose hints ask for a schedule gets it, whatever the others have: choose-format notes it on the product.
// RUN: gossamer-opt %s -p 'choose-format,schedule' | filecheck %s

// CHECK:         "kernel.spmm"(%arg0, %arg1)
// CHECK:         schedule = "rowpairs", {{.*}} "rowpairs(reduction=1, width=64)"
// CHECK:         "kernel.spmm"(%{{.*}}, %arg2)
// CHECK:         schedule = "broadcast"
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @both(%x: tensor<?x64xf32>, %v: tensor<64x64xf32, #CSR> {kernel.density = 0.5 : f64, kernel.schedule = "rowpairs"}, %w: tensor<64x64xf32, #CSR> {kernel.density = 0.5 : f64}) -> tensor<?x64xf32> {
  %h = "kernel.contract"(%x, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<64x64xf32, #CSR>) -> tensor<?x64xf32>
  %y = "kernel.contract"(%h, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<64x64xf32, #CSR>) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}
