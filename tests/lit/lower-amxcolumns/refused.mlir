// Storage and tiles that the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-amxcolumns --split-input-file --verify-diagnostics

// Any other storage.
// expected-error @unknown {{is not stored as panels}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @storage(%x: tensor<?x64xbf16>, %w: tensor<32x64xbf16, #CSR>) -> tensor<?x32xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x64xbf16>, tensor<32x64xbf16, #CSR>) -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}

// -----

// A tile of AMX has sixteen tokens.
// expected-error @unknown {{tile [48] for vectors of 16 sums is not [16], [32] or [64] tokens for 16}}
func.func @tokens(%x: tensor<?x64xbf16>, %w: tensor<32x64xbf16, "panels(reduction=1, rows=32, width=1)">) -> tensor<?x32xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [48]} : (tensor<?x64xbf16>, tensor<32x64xbf16, "panels(reduction=1, rows=32, width=1)">) -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}

// -----

// Its rows are sixteen sums.
// expected-error @unknown {{tile [32] for vectors of 8 sums}}
func.func @lanes(%x: tensor<?x64xbf16>, %w: tensor<32x64xbf16, "panels(reduction=1, rows=32, width=1)">) -> tensor<?x32xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x64xbf16>, tensor<32x64xbf16, "panels(reduction=1, rows=32, width=1)">) -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}
