// Sums that are cut to 32 bits are summed in 32; those that are used whole stay.
// RUN: gossamer-opt %s -p narrow-sums --split-input-file | filecheck %s

// CHECK-LABEL: func.func @cut(
// CHECK:         ^bb0(%[[SUM:.*]]: i32):
// CHECK-NEXT:      arith.sitofp %[[SUM]] : i32 to f32
func.func @cut(%x: tensor<?x8xi8>, %w: tensor<4x8xi8, "quads(reduction=1, rows=1, width=8)">) -> tensor<?x4xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: i64):
    %0 = arith.trunci %sum : i64 to i32
    %1 = arith.sitofp %0 : i32 to f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]} : (tensor<?x8xi8>, tensor<4x8xi8, "quads(reduction=1, rows=1, width=8)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// CHECK-LABEL: func.func @whole(
// CHECK:         ^bb0(%[[SUM:.*]]: i64):
// CHECK-NEXT:      arith.sitofp %[[SUM]] : i64 to f32
func.func @whole(%x: tensor<?x8xi8>, %w: tensor<4x8xi8, "quads(reduction=1, rows=1, width=8)">) -> tensor<?x4xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: i64):
    %0 = arith.sitofp %sum : i64 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]} : (tensor<?x8xi8>, tensor<4x8xi8, "quads(reduction=1, rows=1, width=8)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
