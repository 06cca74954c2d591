// What the verifier of kernel.contract refuses, and in which words.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// A map for each factor.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @one_map(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.contract' has 1 indexing maps for 2 factors}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>]} : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// A map gives as many indices as its factor has dimensions.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @rank(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.contract' map (d0, d1, d2) -> (d2) does not fit tensor<?x8xf32>}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// The factors agree on the size of what is summed over.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sizes(%x: tensor<?x8xf32>, %w: tensor<4x9xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.contract' contraction sizes differ: d2 is 8 and 9}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x9xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
