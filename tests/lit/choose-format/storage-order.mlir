// The weight's type becomes the format of its schedule that fits how it is stored; uses and the function's type follow.
// RUN: gossamer-opt %s -p 'choose-format{schedule=gpu-kblock}' --split-input-file | filecheck %s
// RUN: gossamer-opt %s -p 'choose-format{schedule=gpu-gather}' --split-input-file | filecheck %s --check-prefix=ROWS

// Stored as [M, K]: blocks of the columns.
// CHECK:       #sparse = #sparse_tensor.encoding<{ map = (d0, d1) -> (d1 floordiv 128 : dense, d0 : dense, d1 mod 128 : compressed), posWidth = 32, crdWidth = 16 }>
// CHECK-LABEL: func.func @rows(%arg0: tensor<?x64xf32>, %arg1: tensor<32x64xf32, #sparse>) -> tensor<?x32xf32> {
// CHECK:         "kernel.contract"(%arg0, %arg1)
// CHECK:           : (tensor<?x64xf32>, tensor<32x64xf32, #sparse>) -> tensor<?x32xf32>
// ROWS:       #sparse = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16 }>
// ROWS-LABEL: func.func @rows(%arg0: tensor<?x64xf32>, %arg1: tensor<32x64xf32, #sparse>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @rows(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, #CSR>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, #CSR>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// Stored as [K, M]: blocks of the rows, and the same arrays as above for the transposed matrix.
// CHECK:       #sparse = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 floordiv 128 : dense, d1 : dense, d0 mod 128 : compressed), posWidth = 32, crdWidth = 16 }>
// CHECK-LABEL: func.func @columns(%arg0: tensor<?x64xf32>, %arg1: tensor<64x32xf32, #sparse>)
// ROWS:       #sparse = #sparse_tensor.encoding<{ map = (d0, d1) -> (d1 : dense, d0 : compressed), posWidth = 32, crdWidth = 16 }>
// ROWS-LABEL: func.func @columns(%arg0: tensor<?x64xf32>, %arg1: tensor<64x32xf32, #sparse>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @columns(%x: tensor<?x64xf32>, %w: tensor<64x32xf32, #CSR>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (k, m)>]}
    : (tensor<?x64xf32>, tensor<64x32xf32, #CSR>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// A product of another shape is left as it is: here the weight is on the left.
// CHECK:       #sparse = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>
// CHECK-LABEL: func.func @left(%arg0: tensor<32x64xf32, #sparse>
// ROWS:       #sparse = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>
// ROWS-LABEL: func.func @left(%arg0: tensor<32x64xf32, #sparse>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @left(%w: tensor<32x64xf32, #CSR>, %x: tensor<64x?xf32>) -> tensor<32x?xf32> {
  %y = "kernel.contract"(%w, %x) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(m, t, k) -> (m, k)>, affine_map<(m, t, k) -> (k, t)>]}
    : (tensor<32x64xf32, #CSR>, tensor<64x?xf32>) -> tensor<32x?xf32>
  return %y : tensor<32x?xf32>
}
