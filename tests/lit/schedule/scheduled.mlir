// The width of a vector chooses the sizes of a tile.
// RUN: gossamer-opt %s -p schedule --split-input-file | filecheck %s
// RUN: gossamer-opt %s -p 'schedule{bits=256}' --split-input-file | filecheck %s --check-prefix=AVX2
// RUN: gossamer-opt %s -p 'schedule{bits=128}' --split-input-file | filecheck %s --check-prefix=NEON

// A weight in filled up rows: tiles of two vectors of tokens. The epilogue moves over.
// CHECK-LABEL: func.func @rows(
// CHECK:         "kernel.spmm"(%arg0, %arg1) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[B:.*]] = "kernel.read"(%arg2)
// CHECK-NEXT:      arith.addf %[[SUM]], %[[B]] : f32
// CHECK:         }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [32]} : (tensor<?x64xf32>, tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<?x32xf32>
// CHECK-NOT:     kernel.contract
// AVX2-LABEL: func.func @rows(
// AVX2:         {lanes = 8 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [16]}
// NEON-LABEL: func.func @rows(
// NEON:         {lanes = 4 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [32]}
func.func @rows(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, "padded(reduction=1, columns=32)">, %bias: tensor<32xf32>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<32xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// Stored as [K, M], the weight is summed over its dimension 0.
// CHECK-LABEL: func.func @stored_transposed(
// CHECK:         lanes = 16 : i64, reduction = 0 : i64, schedule = "broadcast", tile = [32]
// AVX2-LABEL: func.func @stored_transposed(
// NEON-LABEL: func.func @stored_transposed(
func.func @stored_transposed(%x: tensor<?x64xf32>, %w: tensor<64x32xf32, "padded(reduction=0, columns=32)">) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (k, m)>]}
    : (tensor<?x64xf32>, tensor<64x32xf32, "padded(reduction=0, columns=32)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// Lanes are those of the sum, not of the narrower elements.
// CHECK-LABEL: func.func @bf16(
// CHECK:         lanes = 16 : i64
// AVX2-LABEL: func.func @bf16(
// AVX2:         lanes = 8 : i64
// NEON-LABEL: func.func @bf16(
func.func @bf16(%x: tensor<?x64xbf16>, %w: tensor<32x64xbf16, "padded(reduction=1, columns=32)">) -> tensor<?x32xbf16> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xbf16>, tensor<32x64xbf16, "padded(reduction=1, columns=32)">) -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}

// -----

// Half as many doubles as floats.
// CHECK-LABEL: func.func @f64(
// CHECK:         lanes = 8 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [16]
// AVX2-LABEL: func.func @f64(
// AVX2:         lanes = 4 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [8]
// NEON-LABEL: func.func @f64(
// NEON:         lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [16]
func.func @f64(%x: tensor<?x64xf64>, %w: tensor<32x64xf64, "padded(reduction=1, columns=32)">) -> tensor<?x32xf64> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f64):
    "kernel.yield"(%sum) : (f64) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf64>, tensor<32x64xf64, "padded(reduction=1, columns=32)">) -> tensor<?x32xf64>
  return %y : tensor<?x32xf64>
}
