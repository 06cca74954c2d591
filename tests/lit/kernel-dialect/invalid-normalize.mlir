// What the verifier of kernel.normalize refuses, and in which words.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// A column of a head has a weight.
func.func @weight(%x: tensor<?x8xf32>, %w: tensor<8xf32>) -> tensor<?x8xf32> {
  // expected-error @below {{multiplies heads of 4 by}}
  %y = "kernel.normalize"(%x, %w) {heads = 2 : i64, head_size = 4 : i64, offset = 0 : i64, eps = 1.0e-6 : f64}
    : (tensor<?x8xf32>, tensor<8xf32>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// Heads lie in the columns of x.
func.func @columns(%x: tensor<?x8xf32>, %w: tensor<4xf32>) -> tensor<?x8xf32> {
  // expected-error @below {{reads columns 4 to 11 of}}
  %y = "kernel.normalize"(%x, %w) {heads = 2 : i64, head_size = 4 : i64, offset = 4 : i64, eps = 1.0e-6 : f64}
    : (tensor<?x8xf32>, tensor<4xf32>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
