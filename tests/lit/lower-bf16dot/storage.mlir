// What is not stored in blocks of pairs has no lowering.
// RUN: gossamer-opt %s -p expose-storage,lower-bf16dot --verify-diagnostics

// expected-error @unknown {{tile [96, 96] of a weight stored as pairs(reduction=1, width=32)}}
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "pairs(reduction=1, width=32)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "bf16dot", tile = [96, 96]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "pairs(reduction=1, width=32)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
