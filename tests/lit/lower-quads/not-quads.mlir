// What is not stored as quads has no lowering.
// RUN: gossamer-opt %s -p expose-storage,lower-quads --verify-diagnostics

// expected-error @unknown {{a weight stored as bytewindows(reduction=1, rows=16, sorted=0) is not stored as quads}}
func.func @region(%x: tensor<?x70xi8>, %w: tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=0)">, %scale: tensor<40xf32>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (m)>} : (tensor<40xf32>) -> f32
    %0 = arith.sitofp %sum : i32 to f32
    %1 = arith.mulf %0, %s : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "quads", tile = [64, 1024, 1]} : (tensor<?x70xi8>, tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=0)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
