// Rows of matrices that are pixels become images; what is read for a channel stays as it is.
// RUN: gossamer-opt %s -p 'convolve{bits=128}' | filecheck %s

// CHECK:       #[[ONE:.*]] = affine_map<(d0, d1, d2) -> (d1)>
// CHECK:       #[[ALL:.*]] = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:.*]]: tensor<?x6x?xf32>, %[[W:.*]]: tensor<8x54xf32, #{{.*}}>, %[[B:.*]]: tensor<8xf32>, %[[R:.*]]: tensor<?x8x?xf32>, %[[D:.*]]: index, %[[H:.*]]: index, %[[V:.*]]: index) -> tensor<?x8x?xf32>
// CHECK-NOT:     kernel.window
// CHECK:         "kernel.convolve"(%[[X]], %[[W]], %[[D]], %[[H]], %[[V]])
// CHECK:           "kernel.read"(%[[B]]) {map = #[[ONE]]}
// CHECK:           "kernel.read"(%[[R]]) {map = #[[ALL]]}
// CHECK:         lanes = 4 : i64, reduction = 1 : i64, window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 5, 5, 1, 4, 2, 0]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @region(%x: tensor<?x54xf32>, %w: tensor<8x54xf32, #CSR>, %b: tensor<8xf32>, %r: tensor<?x8xf32>) -> tensor<?x8xf32>
    attributes {kernel.window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 5, 5, 1, 4, 2, 0]} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = "kernel.read"(%b) {map = affine_map<(t, m) -> (m)>} : (tensor<8xf32>) -> f32
    %1 = "kernel.read"(%r) {map = affine_map<(t, m) -> (t, m)>} : (tensor<?x8xf32>) -> f32
    %2 = arith.addf %sum, %0 : f32
    %3 = arith.addf %2, %1 : f32
    "kernel.yield"(%3) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x54xf32>, tensor<8x54xf32, #CSR>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
