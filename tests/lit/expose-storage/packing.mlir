// A packing has arrays of its own, and an unrealized cast in place of the assemble.
// RUN: gossamer-opt %s -p expose-storage | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x8xf32>,
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[MASKS:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xf32>,
// CHECK-SAME:    %[[OUT:[a-z0-9]*]]: memref<?x4xf32>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: index) {
// CHECK:         %[[P:.*]] = bufferization.to_tensor %[[POS]] restrict
// CHECK:         %[[M:.*]] = bufferization.to_tensor %[[MASKS]] restrict
// CHECK:         %[[V:.*]] = bufferization.to_tensor %[[VAL]] restrict
// CHECK:         builtin.unrealized_conversion_cast %[[P]], %[[M]], %[[V]] : tensor<?xi32>, tensor<?xi32>, tensor<?xf32> to tensor<4x8xf32, "vnnimap(reduction=1, rows=16)">
func.func @region(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "vnnimap(reduction=1, rows=16)">) -> tensor<?x4xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, "vnnimap(reduction=1, rows=16)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
