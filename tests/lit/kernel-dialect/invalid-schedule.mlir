// What the verifiers of the scheduled products refuse, and in which words.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// kernel.spmm takes matrices.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @rank(%x: tensor<?x2x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' works on matrices}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, tile = [32, 64, 16]} : (tensor<?x2x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The weight is sparse.
func.func @dense(%x: tensor<?x8xf32>, %w: tensor<4x8xf32>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' needs a weight with a sparse encoding}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, tile = [32, 64, 16]} : (tensor<?x8xf32>, tensor<4x8xf32>) -> tensor<?x4xf32>
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
  }) {lanes = 8 : i64, reduction = 2 : i64, tile = [32, 64, 16]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
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
  }) {lanes = 8 : i64, reduction = 0 : i64, tile = [32, 64, 16]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
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
  }) {lanes = 8 : i64, reduction = 1 : i64, tile = [32, 64, 16]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x5xf32>
  return %y : tensor<?x5xf32>
}

// -----

// Tokens and rows of a tile fill whole vectors.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @tile(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' tile [36, 64, 16] is not [tokens, rows, K] with tokens and rows multiples of 8 lanes}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, tile = [36, 64, 16]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// A tile has three sizes.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sizes_of_tile(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmm' tile [32, 64] is not [tokens, rows, K] with tokens and rows multiples of 8 lanes}}
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, tile = [32, 64]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// kernel.spmv takes one, two or four tokens at a time.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @tokens(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmv' tokens is 3, must be 1, 2 or 4}}
  %y = "kernel.spmv"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, tokens = 3 : i64} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// kernel.spmv asks the same of its operands.
func.func @operands(%x: tensor<?x8xf32>, %w: tensor<4x8xf32>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.spmv' needs a weight with a sparse encoding}}
  %y = "kernel.spmv"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, tokens = 4 : i64} : (tensor<?x8xf32>, tensor<4x8xf32>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
