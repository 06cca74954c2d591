// Heads that are divided by their root mean squares: sums over the columns of a head, then its columns again.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' | filecheck %s

// The weight stays where it is: a number for all lanes.
// CHECK-LABEL: func.func private @normalized_normalize_tile4(
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK:             vector.fma
// CHECK:           vector.fma
// CHECK:           math.sqrt
// CHECK:           arith.divf
// CHECK:           scf.for
// CHECK:             memref.load
// CHECK:             vector.broadcast
// CHECK-LABEL: func.func @normalized(
// CHECK:         call @normalized_product_tile4
// CHECK:         call @normalized_normalize_tile4
// CHECK:         call @normalized_unpack_tile4
func.func @normalized(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %weight: tensor<2xf32>) -> tensor<?x4xf32> {
  %q = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.normalize"(%q, %weight) {heads = 2 : i64, head_size = 2 : i64, offset = 4 : i64, eps = 1.0e-6 : f64}
    : (tensor<?x8xf32>, tensor<2xf32>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
