// The width of a block of K goes by density; then the hints are dropped.
// RUN: gossamer-opt %s -p choose-format --split-input-file | filecheck %s

// Sparse rows: wide blocks, so that a row has some nonzeros in each.
// CHECK-LABEL: func.func @sparse(%arg0: tensor<?x768xf32>, %arg1: tensor<1024x768xf32, "padded(reduction=1, columns=384)">) -> tensor<?x1024xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sparse(%x: tensor<?x768xf32>, %w: tensor<1024x768xf32, #CSR> {kernel.density = 0.1 : f64}) -> tensor<?x1024xf32> attributes {kernel.tokens = 32 : i64} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x768xf32>, tensor<1024x768xf32, #CSR>) -> tensor<?x1024xf32>
  return %y : tensor<?x1024xf32>
}

// -----

// Denser rows: narrower blocks, whose x stays in the first-level cache.
// CHECK-LABEL: func.func @dense(%arg0: tensor<?x768xf32>, %arg1: tensor<1024x768xf32, "padded(reduction=1, columns=256)">) -> tensor<?x1024xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @dense(%x: tensor<?x768xf32>, %w: tensor<1024x768xf32, #CSR> {kernel.density = 0.5 : f64}) -> tensor<?x1024xf32> attributes {kernel.tokens = 32 : i64} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x768xf32>, tensor<1024x768xf32, #CSR>) -> tensor<?x1024xf32>
  return %y : tensor<?x1024xf32>
}

// -----

// Very sparse rows: wider still.
// CHECK-LABEL: func.func @sparser(%arg0: tensor<?x768xf32>, %arg1: tensor<512x768xf32, "padded(reduction=1, columns=768)">) -> tensor<?x512xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sparser(%x: tensor<?x768xf32>, %w: tensor<512x768xf32, #CSR> {kernel.density = 0.05 : f64}) -> tensor<?x512xf32> attributes {kernel.tokens = 32 : i64} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x768xf32>, tensor<512x768xf32, #CSR>) -> tensor<?x512xf32>
  return %y : tensor<?x512xf32>
}

// -----

// Without a hint the weight counts as one of density 0.1.
// CHECK-LABEL: func.func @unknown(%arg0: tensor<?x768xf32>, %arg1: tensor<1024x768xf32, "padded(reduction=1, columns=384)">) -> tensor<?x1024xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @unknown(%x: tensor<?x768xf32>, %w: tensor<1024x768xf32, #CSR>) -> tensor<?x1024xf32> attributes {kernel.tokens = 32 : i64} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x768xf32>, tensor<1024x768xf32, #CSR>) -> tensor<?x1024xf32>
  return %y : tensor<?x1024xf32>
}

// -----

// No wider than the weight, in whole vectors.
// CHECK-LABEL: func.func @narrow(%arg0: tensor<?x40xf32>, %arg1: tensor<1024x40xf32, "padded(reduction=1, columns=48)">) -> tensor<?x1024xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @narrow(%x: tensor<?x40xf32>, %w: tensor<1024x40xf32, #CSR> {kernel.density = 0.1 : f64}) -> tensor<?x1024xf32> attributes {kernel.tokens = 32 : i64} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x40xf32>, tensor<1024x40xf32, #CSR>) -> tensor<?x1024xf32>
  return %y : tensor<?x1024xf32>
}

// -----

// Blocks are as even as whole vectors allow: 400 columns are 208 and 192.
// CHECK-LABEL: func.func @even(%arg0: tensor<?x400xf32>, %arg1: tensor<1024x400xf32, "padded(reduction=1, columns=208)">) -> tensor<?x1024xf32> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @even(%x: tensor<?x400xf32>, %w: tensor<1024x400xf32, #CSR> {kernel.density = 0.1 : f64}) -> tensor<?x1024xf32> attributes {kernel.tokens = 32 : i64} {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x400xf32>, tensor<1024x400xf32, #CSR>) -> tensor<?x1024xf32>
  return %y : tensor<?x1024xf32>
}
