// What cannot be lowered: sums that no instruction looks up byte by byte, and several tokens at once.
// RUN: gossamer-opt %s -p expose-storage,lower-planes --split-input-file --verify-diagnostics

// expected-error @unknown {{no instruction looks up f32 for a weight stored as windows(reduction=1, lanes=16) byte by byte}}
func.func @lanes(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "planes", tile = [1]} : (tensor<?x8xf32>, tensor<4x8xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// expected-error @unknown {{tile [2] is not one token}}
func.func @tokens(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "windows(reduction=1, lanes=64)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "planes", tile = [2]} : (tensor<?x8xf32>, tensor<4x8xf32, "windows(reduction=1, lanes=64)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
