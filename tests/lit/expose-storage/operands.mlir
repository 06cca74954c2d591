// Tensors become the memory behind them; then come the output, a workspace and the size of the team.
// RUN: gossamer-opt %s -p expose-storage --split-input-file | filecheck %s

// A dense tensor is one memref, a sparse one a memref for each array of its format, and attributes of arguments go.
// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x8xf32>,
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>,
// CHECK-SAME:    %[[BIAS:[a-z0-9]*]]: memref<4xf32>,
// CHECK-SAME:    %[[OUT:[a-z0-9]*]]: memref<?x4xf32>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: index) {
// CHECK:         %[[XT:.*]] = bufferization.to_tensor %[[X]] restrict : memref<?x8xf32> to tensor<?x8xf32>
// CHECK:         %[[P:.*]] = bufferization.to_tensor %[[POS]] restrict
// CHECK:         %[[C:.*]] = bufferization.to_tensor %[[CRD]] restrict
// CHECK:         %[[V:.*]] = bufferization.to_tensor %[[VAL]] restrict
// CHECK:         %[[W:.*]] = sparse_tensor.assemble (%[[P]], %[[C]]), %[[V]] : (tensor<?xi32>, tensor<?xi16>), tensor<?xf32> to tensor<4x8xf32, #sparse>
// CHECK:         %[[B:.*]] = bufferization.to_tensor %[[BIAS]] restrict
// CHECK:         %[[Y:.*]] = "kernel.contract"(%[[XT]], %[[W]])
// CHECK:           "kernel.read"(%[[B]])
// CHECK:         bufferization.materialize_in_destination %[[Y]] in restrict writable %[[OUT]]
// CHECK-NEXT:    return
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 4 : dense, d0 : dense, d1 mod 4 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #KB> {kernel.density = 0.1 : f64}, %bias: tensor<4xf32>) -> tensor<?x4xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<4xf32>) -> f32
    "kernel.yield"(%b) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #KB>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// COO of separate arrays: positions, then both coordinates; the width of an index where the format names none.
// CHECK-LABEL: func.func @coo(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?xindex>, %{{[a-z0-9]*}}: memref<?xindex>, %{{[a-z0-9]*}}: memref<?xindex>, %{{[a-z0-9]*}}: memref<?xf64>,
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<4x8xf64>, %{{[a-z0-9]*}}: memref<?xi8>, %{{[a-z0-9]*}}: index)
#COO = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : compressed(nonunique), d1 : singleton(soa))}>
func.func @coo(%w: tensor<4x8xf64, #COO>) -> tensor<4x8xf64> {
  %0 = sparse_tensor.convert %w : tensor<4x8xf64, #COO> to tensor<4x8xf64>
  return %0 : tensor<4x8xf64>
}

// -----

// Private functions are called from within: they stay on tensors.
// CHECK-LABEL: func.func private @inner(%arg0: tensor<4xf32>) -> tensor<4xf32>
func.func private @inner(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
