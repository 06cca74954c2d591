// Storage and tiles that the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-block --split-input-file --verify-diagnostics

// Any other storage.
// expected-error @unknown {{is not stored as blocks}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @storage(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "block", tile = [32, 64]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// A tile has two sizes, the tokens in whole vectors.
// expected-error @unknown {{tile [36, 64] is not [tokens, rows] with tokens a multiple of 8 lanes}}
func.func @vectors(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "blocks(reduction=1, rows=2, columns=2, width=16)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "block", tile = [36, 64]} : (tensor<?x8xf32>, tensor<4x8xf32, "blocks(reduction=1, rows=2, columns=2, width=16)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
