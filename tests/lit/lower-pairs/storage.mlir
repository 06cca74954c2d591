// What is not stored as pairs has no lowering.
// RUN: gossamer-opt %s -p expose-storage,lower-pairs --verify-diagnostics

// expected-error @unknown {{a weight stored as vnni(reduction=1, rows=32, columns=4) is not stored as pairs}}
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "vnni(reduction=1, rows=32, columns=4)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "pairs", tile = [64, 1024]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "vnni(reduction=1, rows=32, columns=4)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
