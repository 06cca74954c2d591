// Storage and tiles that the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-broadcast --split-input-file --verify-diagnostics

// Any other storage.
// expected-error @unknown {{is not stored as padded}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @storage(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [16]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// A tile is one, two, four or eight vectors of tokens.
// expected-error @unknown {{tile [24] is not one, two, four or eight vectors of 8 tokens}}
func.func @tokens(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "padded(reduction=1, columns=16)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [24]} : (tensor<?x8xf32>, tensor<4x8xf32, "padded(reduction=1, columns=16)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
