// Attention and orders of rows that do not fit their operands are refused.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

// The result has the columns of all heads.
func.func @heads(%q: tensor<?x8xf32>, %length: index) -> tensor<?x6xf32> {
  // expected-error @below {{2 heads of 4 make 8 columns}}
  %y = "kernel.attend"(%q, %q, %q, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 2 : i64, head_size = 4 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, index) -> tensor<?x6xf32>
  return %y : tensor<?x6xf32>
}

// -----

// Each head of keys and values serves equally many queries.
func.func @groups(%q: tensor<?x12xf32>, %length: index) -> tensor<?x12xf32> {
  // expected-error @below {{has 3 heads for 2 of keys and values}}
  %y = "kernel.attend"(%q, %q, %q, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 3 : i64, kv_heads = 2 : i64, head_size = 4 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x12xf32>, tensor<?x12xf32>, tensor<?x12xf32>, index) -> tensor<?x12xf32>
  return %y : tensor<?x12xf32>
}

// -----

// Values that begin too far to the right.
func.func @columns(%q: tensor<?x8xf32>, %length: index) -> tensor<?x8xf32> {
  // expected-error @below {{reads columns 4 to 11 of v, which is}}
  %y = "kernel.attend"(%q, %q, %q, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 2 : i64, head_size = 4 : i64,
    offsets = [0, 0, 4], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, index) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// The rows of a matrix change places, and nothing else.
func.func @regroup(%x: tensor<?x8xf32>, %length: index) -> tensor<?x4xf32> {
  // expected-error @below {{has result tensor<?x4xf32>, must be elements [tokens, 8]}}
  %y = "kernel.regroup"(%x, %length) {inverse = false} : (tensor<?x8xf32>, index) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
