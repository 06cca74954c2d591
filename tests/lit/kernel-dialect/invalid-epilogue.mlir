// What the verifiers refuse of an epilogue, of kernel.read in it, and in which words.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// The epilogue takes the sum and nothing else.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @arguments(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.contract' needs one epilogue block that takes the sum}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32, %more: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// It ends in kernel.yield.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @unfinished(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.contract' epilogue must end in kernel.yield}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    llvm.unreachable
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// It yields an element of the result.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @type(%x: tensor<?x8xbf16>, %w: tensor<4x8xbf16, #CSR>) -> tensor<?x4xbf16> {
  // expected-error @below {{'kernel.contract' epilogue yields f32, the result holds bf16}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xbf16>, tensor<4x8xbf16, #CSR>) -> tensor<?x4xbf16>
  return %y : tensor<?x4xbf16>
}

// -----

// kernel.read goes by the dimensions of the result, not by those of the contraction.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @read_dimensions(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>, %b: tensor<4xf32>) -> tensor<?x4xf32> {
  // expected-error @below {{'kernel.contract' epilogue reads with a map over 3 dimensions, the result has 2}}
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = "kernel.read"(%b) {map = affine_map<(t, m, k) -> (m)>} : (tensor<4xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x8xf32>, tensor<4x8xf32, #CSR>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// -----

// kernel.read has an index for each dimension of its operand.
func.func @read_rank(%b: tensor<4xf32>) {
  // expected-error @below {{'kernel.read' map (d0, d1) -> (d0, d1) does not fit tensor<4xf32>}}
  %0 = "kernel.read"(%b) {map = affine_map<(t, m) -> (t, m)>} : (tensor<4xf32>) -> f32
  return
}

// -----

// kernel.read gives an element of its operand; it does not convert.
func.func @read_type(%b: tensor<4xbf16>) {
  // expected-error @below {{'kernel.read' gives f32, its operand holds bf16}}
  %0 = "kernel.read"(%b) {map = affine_map<(t, m) -> (m)>} : (tensor<4xbf16>) -> f32
  return
}
