// What is not stored in panels has no lowering.
// RUN: gossamer-opt %s -p expose-storage,lower-amxquads --verify-diagnostics

// expected-error @unknown {{a weight stored as quads(reduction=1, rows=1, width=64) is not stored as panels}}
func.func @region(%x: tensor<?x64xi8>, %w: tensor<32x64xi8, "quads(reduction=1, rows=1, width=64)">) -> tensor<?x32xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxquads", tile = [32]} : (tensor<?x64xi8>, tensor<32x64xi8, "quads(reduction=1, rows=1, width=64)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}
