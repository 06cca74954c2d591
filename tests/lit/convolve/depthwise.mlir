// Where channels keep to themselves, all sizes are open, the weight is dense, and the sizes of the images come as numbers.
// RUN: gossamer-opt %s -p 'convolve{bits=128}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:.*]]: tensor<?x?x?xf32>, %[[W:.*]]: tensor<?x9xf32>, %[[B:.*]]: tensor<?xf32>, %[[H:.*]]: index, %[[V:.*]]: index) -> tensor<?x?x?xf32>
// CHECK-NOT:     kernel.depthwise
// CHECK:         "kernel.convolve_depthwise"(%[[X]], %[[W]], %[[H]], %[[V]])
// CHECK:           "kernel.read"(%[[B]])
// CHECK:         lanes = 4 : i64, window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 4, 0]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @region(%x: tensor<?x9xf32>, %w: tensor<8x9xf32, #CSR>, %b: tensor<8xf32>) -> tensor<?x8xf32>
    attributes {kernel.window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 4, 0], kernel.depthwise} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = "kernel.read"(%b) {map = affine_map<(t, m) -> (m)>} : (tensor<8xf32>) -> f32
    %1 = arith.addf %sum, %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x9xf32>, tensor<8x9xf32, #CSR>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
