// What the verifiers of the scheduled products refuse, and in which words.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// kernel.spmm takes matrices.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @rank(%x: tensor<?x2x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' works on matrices}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 64]} : (tensor<?x2x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The weight is sparse.
func.func @dense(%x: tensor<?x8xf32>, %w: tensor<4x8xf32>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' needs a weight with a sparse encoding}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 64]} : (tensor<?x8xf32>, tensor<4x8xf32>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The weight has two dimensions, one of them is summed over.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @reduction(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' reduction is dimension 2 of the weight, must be 0 or 1}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 2 : i64, schedule = "rowpairs", tile = [32, 64]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// x and the weight agree on the size of what is summed over.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sizes(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' contraction sizes differ: 8 and 4}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 0 : i64, schedule = "rowpairs", tile = [32, 64]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The result has a column for each row of the weight.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @columns(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x5xf32> {
  // expected-error @below {{'kernel.spmm' result has 5 columns, the weight gives 4}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 64]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x5xf32>
  return %y : tensor<?x5xf32>
}

// -----

// A tile has at least one size, and all are positive.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @tile(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' tile [32, 0] is not a list of positive numbers}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 0]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
