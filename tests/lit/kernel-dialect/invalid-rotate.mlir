// What the verifier of kernel.rotate refuses, and in which words.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// Heads lie in the columns of x.
func.func @columns(%x: tensor<?x8xf32>, %a: tensor<?x4xf32>) -> tensor<?x8xf32> {
  // expected-error @below {{reads columns 4 to 11 of}}
  %y = "kernel.rotate"(%x, %a, %a) {heads = 2 : i64, head_size = 4 : i64, rotated = 4 : i64, offset = 4 : i64}
    : (tensor<?x8xf32>, tensor<?x4xf32>, tensor<?x4xf32>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// Columns turn in pairs.
func.func @odd(%x: tensor<?x6xf32>, %a: tensor<?x3xf32>) -> tensor<?x6xf32> {
  // expected-error @below {{turns 3 columns of heads of 3}}
  %y = "kernel.rotate"(%x, %a, %a) {heads = 2 : i64, head_size = 3 : i64, rotated = 3 : i64, offset = 0 : i64}
    : (tensor<?x6xf32>, tensor<?x3xf32>, tensor<?x3xf32>) -> tensor<?x6xf32>
  return %y : tensor<?x6xf32>
}

// -----

// Each column that turns, or each pair of them, has a cosine and a sine.
func.func @tables(%x: tensor<?x8xf32>, %a: tensor<?x3xf32>) -> tensor<?x8xf32> {
  // expected-error @below {{turns 4 columns by}}
  %y = "kernel.rotate"(%x, %a, %a) {heads = 2 : i64, head_size = 4 : i64, rotated = 4 : i64, offset = 0 : i64}
    : (tensor<?x8xf32>, tensor<?x3xf32>, tensor<?x3xf32>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
