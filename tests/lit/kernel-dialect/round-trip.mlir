// Every op of the dialect is printed as it was read, and reads again.
// RUN: gossamer-opt %s --split-input-file | gossamer-opt --split-input-file | filecheck %s

// A contraction with an epilogue that reads a vector, a matrix, one number a token, and a number.
// CHECK-LABEL: func.func @contract(
// CHECK:         "kernel.contract"(%arg0, %arg1) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[B:.*]] = "kernel.read"(%arg2) {map = #{{.*}}} : (tensor<4xf32>) -> f32
// CHECK-NEXT:      %[[R:.*]] = "kernel.read"(%arg3) {map = #{{.*}}} : (tensor<?x4xf32>) -> f32
// CHECK-NEXT:      %[[T:.*]] = "kernel.read"(%arg4) {map = #{{.*}}} : (tensor<?x1xf32>) -> f32
// CHECK-NEXT:      %[[A:.*]] = "kernel.read"(%arg5) {map = #{{.*}}} : (tensor<f32>) -> f32
// CHECK:           "kernel.yield"(%{{.*}}) : (f32) -> ()
// CHECK-NEXT:    }) {indexing_maps = [#{{.*}}, #{{.*}}]} : (tensor<?x8xf32>, tensor<4x8xf32, #sparse>) -> tensor<?x4xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @contract(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>, %bias: tensor<4xf32>, %residual: tensor<?x4xf32>,
                    %scale: tensor<?x1xf32>, %alpha: tensor<f32>) -> tensor<?x4xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<4xf32>) -> f32
    %r = "kernel.read"(%residual) {map = affine_map<(t, m) -> (t, m)>} : (tensor<?x4xf32>) -> f32
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (t, 0)>} : (tensor<?x1xf32>) -> f32
    %a = "kernel.read"(%alpha) {map = affine_map<(t, m) -> ()>} : (tensor<f32>) -> f32
    %0 = arith.addf %sum, %b : f32
    %1 = arith.mulf %0, %a : f32
    %2 = arith.mulf %1, %s : f32
    %3 = arith.addf %2, %r : f32
    "kernel.yield"(%3) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The result may be narrower than the sum, and the weight stored the other way round.
// CHECK-LABEL: func.func @spmm(
// CHECK:         "kernel.spmm"(%arg0, %arg1) ({
// CHECK:           arith.truncf
// CHECK:         }) {lanes = 16 : i64, reduction = 0 : i64, schedule = "rowpairs", tile = [64, 1024]}
// CHECK-SAME:      : (tensor<?x384xbf16>, tensor<384x4xbf16, #sparse>) -> tensor<?x4xbf16>
#KB = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 floordiv 192 : dense, d1 : dense, d0 mod 192 : compressed)}>
func.func @spmm(%x: tensor<?x384xbf16>, %w: tensor<384x4xbf16, #KB>) -> tensor<?x4xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 0 : i64, schedule = "rowpairs", tile = [64, 1024]}
    : (tensor<?x384xbf16>, tensor<384x4xbf16, #KB>) -> tensor<?x4xbf16>
  return %y : tensor<?x4xbf16>
}

// -----

// CHECK-LABEL: func.func @spmv(
// CHECK:         "kernel.spmm"(%arg0, %arg1) ({
// CHECK:         }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "lookup", tile = [4]}
// CHECK-SAME:      : (tensor<?x8xf32>, tensor<4x8xf32, #sparse>) -> tensor<?x4xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @spmv(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "lookup", tile = [4]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
