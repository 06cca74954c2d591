// What cannot be lowered: vectors that no instruction looks up, and too many tokens at once.
// RUN: gossamer-opt %s -p expose-storage,lower-lookup --split-input-file --verify-diagnostics

// expected-error @unknown {{no instruction looks up 4 lanes of f32}}
func.func @lanes(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "windows(reduction=1, lanes=4)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "lookup", tile = [1]} : (tensor<?x8xf32>, tensor<4x8xf32, "windows(reduction=1, lanes=4)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// expected-error @unknown {{tile [9] is not a number of tokens from 1 to 8}}
func.func @tokens(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "lookup", tile = [9]} : (tensor<?x8xf32>, tensor<4x8xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
