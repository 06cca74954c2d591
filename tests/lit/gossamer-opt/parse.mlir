// Without a pipeline the module is read, verified and printed; sparse encodings and kernel ops included.
// RUN: gossamer-opt %s | filecheck %s

// CHECK:       #[[CSR:.*]] = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>
// CHECK-LABEL: func.func @product(
// CHECK:         "kernel.contract"(%{{.*}}, %{{.*}}) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      "kernel.yield"(%[[SUM]]) : (f32) -> ()
// CHECK-NEXT:    }) {indexing_maps = {{.*}}} : (tensor<?x8xf32>, tensor<4x8xf32, #[[CSR]]>) -> tensor<?x4xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @product(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
