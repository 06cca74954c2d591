// Storage and tiles that the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-blockvec --split-input-file --verify-diagnostics

// The rows and columns of a vector have to fill its lanes.
// expected-error @unknown {{is not stored in vectors of 8 lanes}}
func.func @lanes(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "blockvec(reduction=1, rows=2, columns=2, depth=1)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "blockvec", tile = [8]} : (tensor<?x8xf32>, tensor<4x8xf32, "blockvec(reduction=1, rows=2, columns=2, depth=1)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// One, two, four or eight tokens at a time.
// expected-error @unknown {{tile [3] is not one of 1, 2, 4 or 8 tokens}}
func.func @tokens(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, "blockvec(reduction=1, rows=4, columns=2, depth=1)">) -> tensor<?x4xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "blockvec", tile = [3]} : (tensor<?x8xf32>, tensor<4x8xf32, "blockvec(reduction=1, rows=4, columns=2, depth=1)">) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
